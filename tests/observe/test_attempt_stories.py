"""How attempts ended, as people are told: what happened next decides, and lost nodes are named at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.attempts import EndRecord, attempt_stories, lost_nodes
from prorl_hpc.observe.report import write_report
from prorl_hpc.observe.snapshot import SnapshotReader


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root = str(tmp_path)
    return RunDirectory.create(config)


def begin(run: RunDirectory, number: int, at: float) -> RunDirectory:
    attempt = run.begin_attempt(number)
    write_json(attempt.placement_file, [{"rank": 0, "host": "gpu01"}, {"rank": 1, "host": "cpu01"}])
    os.utime(attempt.placement_file, (at, at))
    return attempt


def test_what_came_next_tells_how_an_attempt_ended(run: RunDirectory) -> None:
    begin(run, 1, 1000.0)
    write_json(run.ending_file, EndRecord("suspended", "SIGTERM from Slurm", 1060.0))
    second = begin(run, 2, 1100.0)
    (second.state / "launcher").touch()
    os.utime(second.state / "launcher", (1130.0, 1130.0))
    write_json(second.stop_marker, {"ending": "suspended", "reason": "attempt 4 has begun"})  # written by the next
    run.begin_attempt(3)
    begin(run, 4, 1200.0)
    told = attempt_stories(run, living=True)
    assert [story.how for story in told] == ["suspended, went on", "cut off, went on", "never began", ""]
    assert [story.seconds for story in told] == [60.0, 30.0, None, None]
    assert "node of its launcher was lost" in told[1].reason
    assert [story.as_json["goes_on"] for story in told] == [True, True, False, False]
    assert attempt_stories(run, living=False)[-1].how == "cut off"


def test_a_job_that_is_gone_does_not_go_on(run: RunDirectory) -> None:
    begin(run, 1, 1000.0)
    write_json(run.ending_file, EndRecord("suspended", "the allocation ends soon", 1060.0, goes_on=True))
    assert [attempt_stories(run, living=living)[0].how for living in (True, False)] == [
        "suspended, goes on",
        "suspended",
    ]


def test_a_lost_node_and_its_processes_are_shown_while_the_others_go_on(run: RunDirectory) -> None:
    begin(run, 1, 1000.0)
    nodes = [{"processes": [{"name": name}]} for name in ("coordinator", "worker-1")]
    write_json(run.plan_file, {"components": [{"name": "rollout", "nodes": nodes}]})
    for name, host in (("coordinator", "gpu01"), ("worker-1", "cpu01")):
        write_json(run.process_state(name), ProcessState(name, name.partition("-")[0], host, 1, Phase.READY))
    assert lost_nodes(run) == []
    (run.state / "node-1.lost").touch()
    snapshot = SnapshotReader(run).read()
    assert [(node.host, node.processes) for node in snapshot.lost] == [("cpu01", ["worker-1"])]
    assert [(p.name, p.phase, p.detail) for p in snapshot.processes] == [
        ("coordinator", Phase.READY, ""),
        ("worker-1", Phase.FAILED, "its node cpu01 was lost"),
    ]
    assert attempt_stories(run, living=True)[0].lost_nodes == ["cpu01"]
    text = write_report(run).read_text()
    assert "## Attempts" in text
    assert "| cpu01 |" in text


def test_the_report_lists_attempts_and_says_why_in_words(run: RunDirectory) -> None:
    begin(run, 1, 1000.0)
    write_json(
        run.ending_file, EndRecord("suspended", "node cpu02 was lost", 1075.0, goes_on=True, lost_nodes=["cpu02"])
    )
    second = begin(run, 2, 1100.0)
    write_json(second.stop_marker, {"ending": "stopped", "reason": "prorl-hpc stop", "drain_s": 3.0})
    text = write_report(second).read_text()
    assert "**stopped** (prorl-hpc stop)" in text
    assert "| 1:15 | suspended, went on | node cpu02 was lost | cpu02 |" in text
    assert "{" not in text
