"""An outside server that was well when it was registered, and is looked at again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import serve_outside

from prorl_hpc.core.events import ServerSeen
from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.rollout.outside_servers import OutsideServers
from prorl_hpc.tasks.testing import write_chat_model


class Keepsakes:
    """As much of them as registering needs."""

    def add_outside(self, server: OutsideServer) -> None:
        self.kept = server


def model(path: Path, vocab_size: int = 448) -> Path:
    write_chat_model(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return path


async def test_one_that_comes_back_with_another_model_or_garbage_gets_no_rollouts(
    socket_dir: Path, tmp_path: Path
) -> None:
    ours = model(tmp_path / "ours")
    told: list[Any] = []
    servers = OutsideServers(Keepsakes(), told.append, lambda policy: 3, lambda policy: ours)  # type: ignore[arg-type]
    path = socket_dir / "o.sock"
    async with serve_outside(path, model=ours) as fake:
        await servers.add(OutsideServer("outside", fake.url))
    (seen,) = told
    assert (seen.ref.model, seen.ref.vocab_size, seen.weight_version) == ("policy", 448, 3)
    outside = servers._servers["outside"]

    async def look(*modes: str, model: Path = ours) -> tuple[bool, str]:
        async with serve_outside(path, *modes, model=model):
            await servers._look(outside)
        assert isinstance(told[-1], ServerSeen) and told[-1].healthy is outside.healthy
        return outside.healthy, outside.detail

    assert await look() == (True, "")
    other = model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    healthy, detail = await look(model=other)
    assert not healthy and "another vocabulary" in detail
    healthy, detail = await look("positive")  # one that was not well has to generate
    assert not healthy and "0.25 as the logprob" in detail
    assert await look() == (True, "")


async def test_one_that_generates_no_more_is_not_well_until_it_does(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    servers = OutsideServers(Keepsakes(), told.append, lambda policy: 0, turn_s=0.3)  # type: ignore[arg-type]
    path = socket_dir / "o.sock"
    async with serve_outside(path) as fake:
        await servers.add(OutsideServer("outside", fake.url))
    outside = servers._servers["outside"]
    async with serve_outside(path, "busy"):
        await servers._look(outside)  # it lists its models, and is not asked for more
        assert outside.healthy
        servers.doubt("outside")
        servers.doubt("inference-0")  # of the run's own
        await servers._look(outside)
        assert not outside.healthy and "within 0.3 s" in outside.detail  # what it has for a turn
        monkeypatch.setattr("prorl_hpc.inference.outside_probe._LIMIT_S", 0.2)
        await servers._look(outside)
        assert not told[-1].healthy and "within 0.2 s" in outside.detail
    monkeypatch.undo()
    async with serve_outside(path):
        await servers._look(outside)
    assert told[-1].healthy and outside.detail == ""


@pytest.mark.parametrize("model_name", ["other"])
async def test_one_that_serves_another_model_now_is_not_well(socket_dir: Path, model_name: str) -> None:
    told: list[Any] = []
    servers = OutsideServers(Keepsakes(), told.append, lambda policy: 0)  # type: ignore[arg-type]
    path = socket_dir / "o.sock"
    async with serve_outside(path, "two-models") as fake:
        await servers.add(OutsideServer("outside", fake.url, model=model_name))
    async with serve_outside(path):
        await servers._look(servers._servers["outside"])
    assert not told[-1].healthy
    assert "model other is not among them" in servers._servers["outside"].detail
