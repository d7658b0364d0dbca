"""A server over several nodes: who is dead, the command lines, and its ports."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.ports import BLOCK, PortBlock
from prorl_hpc.inference.server_group import Announcement, MemberReport, MemberWatch, ServerGroup
from prorl_hpc.inference.vllm_settings import GroupPlace, VllmSettings


def test_members_find_the_generation_that_is_announced_and_are_heard_in_it(tmp_path: Path) -> None:
    group = ServerGroup(tmp_path, "inference-0", 3)
    assert group.announced() is None
    first = group.announce("10.0.0.1", 20_000)
    assert group.announced() == first == Announcement(first.generation, "10.0.0.1", 20_000)
    group.report(1, MemberReport(first.generation, 1))
    group.report(2, MemberReport("of an older one", 1))
    assert group.reports(first.generation) == {1: MemberReport(first.generation, 1)}
    assert group.announce("10.0.0.1", 20_000).generation != first.generation
    group.withdraw()
    group.withdraw()
    assert group.announced() is None


def test_a_member_is_dead_by_its_word_or_by_its_silence() -> None:
    watch = MemberWatch(lost_after_s=10.0)
    assert watch.dead({}, 0.0) == ""
    assert watch.dead({1: MemberReport("g", 1), 2: MemberReport("g", 1)}, 0.0) == ""
    assert watch.dead({1: MemberReport("g", 2), 2: MemberReport("g", 1)}, 9.0) == ""
    assert "member on node 3 has said nothing for 11 s" in watch.dead(
        {1: MemberReport("g", 3), 2: MemberReport("g", 1)}, 11.0
    )
    assert "member on node 2 is dead: killed" in watch.dead({1: MemberReport("g", 3, "killed")}, 11.0)


def settings(tmp_path: Path, place: GroupPlace | None, **engine: int) -> VllmSettings:
    return VllmSettings(EngineConfig(**engine), tmp_path, 128, tmp_path / "s", tmp_path / "c", [], place)  # type: ignore[arg-type]


def test_the_command_lines_of_a_leader_and_of_a_member(tmp_path: Path) -> None:
    def command(rank: int) -> list[str]:
        place = GroupPlace(2, rank, "10.0.0.1", 20_032)
        return settings(tmp_path, place, tensor_parallel=8, pipeline_parallel=2).command()

    common = "--nnodes 2 --node-rank {} --master-addr 10.0.0.1 --master-port 20032 --distributed-executor-backend mp"
    leader, member = " ".join(command(0)), " ".join(command(1))
    for rank, words in enumerate((leader, member)):
        assert common.format(rank) in words
        assert "--tensor-parallel-size 8 --pipeline-parallel-size 2" in words
    assert "--uds" in leader and "--headless" not in leader
    assert "--headless" in member and "--uds" not in member
    alone = " ".join(settings(tmp_path, None).command())
    assert "--uds" in alone and "--nnodes" not in alone and "--headless" not in alone


def test_every_server_has_ports_of_its_own(tmp_path: Path) -> None:
    blocks = [PortBlock.claim() for _ in range(4)]
    try:
        firsts = sorted(block.first for block in blocks)
        assert all(b - a >= BLOCK for a, b in itertools.pairwise(firsts))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", firsts[0] + BLOCK - 1))
        ports = [settings(tmp_path, None).environment(first)["VLLM_PORT"] for first in firsts]
        assert ports == [str(first + 1) for first in firsts]
    finally:
        for block in blocks:
            block.close()
    with socket.socket() as other:
        other.bind(("", firsts[0] + BLOCK - 1))
