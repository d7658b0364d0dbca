from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prorl_hpc.bench.point_measures import ROLLOUT_SCHEMA, measure, rollout_table, utilisation
from prorl_hpc.bench.scaling_records import (
    RECORD_FILE,
    BatchNote,
    GaugeSample,
    LoadOrder,
    LoadRecord,
    PointResult,
    PointSpec,
    PointState,
)
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.store import compose
from prorl_hpc.inference.request_records import RequestRecords
from prorl_hpc.messages.batch import WhenFull
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, Stage, StageTiming, Status
from prorl_hpc.messages.trajectory import Segment, Trajectory
from prorl_hpc.observe.restarts import Restart, RestartLog
from prorl_hpc.observe.rollout_store import RolloutStore, StoredRollout

BEGAN = 1000.0
SPEC = PointSpec("nodes-2", 2, [], LoadOrder(rollouts=20))
POOL_SIZES = {"init": 4, "ready": 8, "run": 10, "eval": 5}


def rollout(number: int, status: Status = Status.DONE) -> RolloutResult:
    """Two turns of 3 and 4 tokens; RUN began two seconds before the end."""
    segments = [
        Segment([1] * 9),
        Segment([2] * 3, [0.0] * 3, True, 0),
        Segment([1] * 2),
        Segment([2] * 4, [0.0] * 4, True, 0),
    ]
    metrics = {"turns": 2.0, "tool_calls": 2.0, "tool_s": 1.5, "tool_asked_s": 1.0} if status is Status.DONE else {}
    timings = [StageTiming(Stage.INIT, 0.5, 1.0), StageTiming(Stage.RUN, 0.25, 0.5)]
    timings += [StageTiming(Stage.EVAL, 0.0, 1.5)] if status is Status.DONE else []
    reward = 1.0 if status is Status.DONE else None
    trajectory = Trajectory(segments)
    return RolloutResult(
        f"load-{number}", "", 0, "t", status, reward, metrics, trajectory, timings=timings, worker="w", server="s"
    )


def sample(at: float, run: int, running: int) -> GaugeSample:
    return GaugeSample(at, {"init": 1, "ready": 8, "run": run, "eval": 0}, {"a": running, "b": 0}, {"a": 0, "b": 0})


def record(ended_at_s: dict[str, float], seconds: float = 30.0) -> LoadRecord:
    """Before the steady time nothing is in use, in it RUN is full."""
    at = {name: BEGAN + s for name, s in ended_at_s.items()}
    steady = [sample(BEGAN + 10, 10, 6), sample(BEGAN + 11, 10, 5), sample(BEGAN + 12, 10, 4)]
    samples = [sample(BEGAN + 1, 0, 0), *steady, sample(BEGAN + 29, 0, 0)]
    return LoadRecord(BEGAN, BEGAN + seconds, at, [], 0.0, samples, POOL_SIZES, 0.4)


def a_run(root: Path, results: list[RolloutResult], *words: str) -> RunDirectory:
    run = RunDirectory.create(compose([f"run.root={root}", "engine=scripted", "trainer.enabled=false", *words]))
    file = RolloutStore(run).begin_singles(0, 0)
    for result in results:
        file.add(StoredRollout(result, result.trajectory))
    file.finish()
    return run


def test_rates_are_those_between_the_first_and_the_last_tenth(tmp_path: Path) -> None:
    done = [rollout(number) for number in range(20)]
    run = a_run(tmp_path, [*done, rollout(20, Status.FAILED)])
    figures = measure(run, record({f"load-{n}": 5.0 + n for n in range(20)}), SPEC)
    assert (figures.done, figures.not_done, figures.seconds) == (20, 1, 30.0)
    assert figures.per_s == pytest.approx(20 / 30)
    assert figures.steady_per_s == pytest.approx(1.0)
    assert figures.turns_per_s == pytest.approx(2.0)
    assert figures.generated_tokens_per_s == pytest.approx(7.0)
    assert figures.utilisation == {"init": 0.25, "ready": 1.0, "run": 1.0, "eval": 0.0}
    assert (figures.engine_busy, figures.engine_requests) == (0.5, 2.5)
    assert (figures.waits["init"].mean, figures.waits["run"].p50, figures.stages["eval"].p99) == (0.5, 0.25, 1.5)
    assert figures.stages["run"].mean == pytest.approx(0.5)
    assert figures.tool_call_s == pytest.approx(0.25)
    assert figures.coordinator_s == pytest.approx(0.02)
    assert (figures.batch_s, figures.trainer_busy, figures.prefix_hit_rate) == ([], None, None)


def test_batches_and_recorded_requests_have_figures_of_their_own(tmp_path: Path) -> None:
    run = a_run(tmp_path, [rollout(1)])
    requests = RequestRecords(run.requests / "inference-0.jsonl", "scripted", "here")
    answer = Completion([1], [0.0], FinishReason.STOP, [VersionSpan(0, 0, 1)], cached_prompt_tokens=30)
    for _ in range(2):
        opened = requests.begin()
        opened.answer = answer
        requests.end(opened, prompt_tokens=40, queued_s=0.0)
    requests.close()
    noted = record({"load-1": 9.0})
    noted.batches, noted.trained_s = [BatchNote(12.0, 4, 2, 7, BEGAN + 12)], 6.0
    figures = measure(run, noted, SPEC)
    assert figures.batch_s == [12.0]
    assert figures.trainer_busy == pytest.approx(0.2)
    assert figures.prefix_hit_rate == pytest.approx(0.75)


def test_coupled_there_is_one_pool(tmp_path: Path) -> None:
    run = a_run(tmp_path, [rollout(1)], "rollout.coupled=true")
    noted = record({"load-1": 9.0})
    noted.samples = [GaugeSample(BEGAN + n, {"init": 2, "ready": 0, "run": 3, "eval": 4}, {}, {}) for n in range(3)]
    figures = measure(run, noted, SPEC)
    assert figures.utilisation == {"coupled": 0.9, "run": 0.3}
    assert (figures.engine_busy, figures.engine_requests) == (None, None)


def test_what_was_seen_less_than_three_times_has_no_mean(tmp_path: Path) -> None:
    noted = record({f"load-{n}": 5.0 + n for n in range(20)})
    noted.samples = [sample(BEGAN + 1, 0, 0), sample(BEGAN + 10, 0, 1), sample(BEGAN + 12, 10, 1)]
    figures = measure(a_run(tmp_path, [rollout(number) for number in range(20)]), noted, SPEC)
    assert (figures.utilisation, figures.engine_busy, figures.engine_requests) == ({}, None, None)


def test_restarts_and_turns_that_were_too_short_are_counted(tmp_path: Path) -> None:
    done = [rollout(1), rollout(2)]
    done[0].metrics["short_turns"] = 2.0
    run = a_run(tmp_path, done)
    for rank, name in enumerate(("coordinator", "worker-0")):
        log = RestartLog(run.restarts_file(rank))
        for count in range(1, rank + 2):
            log.append(Restart(name, "node", "was killed by SIGKILL", count, 3, 10.0))
    figures = measure(run, record({"load-1": 9.0, "load-2": 9.0}), SPEC)
    assert (figures.restarts, figures.short_turns) == ({"coordinator": 1, "worker-0": 2}, 2)


def test_a_pool_without_slots_has_no_utilisation() -> None:
    found = utilisation([sample(0.0, 5, 0)], POOL_SIZES | {"ready": 0}, coupled=False)
    assert found == {"init": 0.25, "run": 0.5, "eval": 0.0}


def test_the_rate_of_few_rollouts_is_over_the_whole_time(tmp_path: Path) -> None:
    figures = measure(a_run(tmp_path, [rollout(1), rollout(2)]), record({"load-1": 9.0, "load-2": 9.0}), SPEC)
    assert figures.steady_per_s == pytest.approx(2 / 30)


def test_a_point_without_a_rollout_that_is_done_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nodes-2: none of its rollouts is done \(1 failed\)"):
        measure(a_run(tmp_path / "a", [rollout(1, Status.FAILED)]), record({}), SPEC)
    said = [Failure(Stage.RUN, FailureKind.TASK, message) for message in ("turn 3 is long", "boom", "turn 9 is long")]
    broken = [msgspec.structs.replace(rollout(n, Status.FAILED), failure=why) for n, why in enumerate(said)]
    with pytest.raises(RunError, match=r"\(3 failed\); 2 of them broke in run \(task\): turn 3 is long\. All failures"):
        measure(a_run(tmp_path / "d", broken), record({}), SPEC)
    with pytest.raises(RunError, match=r"a point needs rollout\.keep_trajectories=true"):
        measure(a_run(tmp_path / "b", []), record({}), SPEC)
    with pytest.raises(RunError, match=r"1 rollouts of .* are done that bench_record.json does not know"):
        measure(a_run(tmp_path / "c", [rollout(1)]), record({}), SPEC)


def test_what_was_carried_past_the_last_batch_is_left_out(tmp_path: Path) -> None:
    carrying = PointSpec("batch-1", 1, [], LoadOrder(batches=2, when_full=WhenFull.CARRY))
    run = a_run(tmp_path, [rollout(n) for n in range(1, 7)])
    assert measure(run, record({f"load-{n}": float(n) for n in range(1, 6)}), carrying).done == 5


def test_the_table_has_a_row_of_every_rollout_of_every_point(tmp_path: Path) -> None:
    run = a_run(tmp_path, [rollout(1), rollout(2, Status.CANCELLED)])
    write_json(run.path / RECORD_FILE, record({"load-1": 9.0}))
    unfinished = a_run(tmp_path, [rollout(3)])
    results = [
        PointResult(SPEC, PointState.DONE, "", str(run.path), "", "", "", None),
        PointResult(SPEC, PointState.FAILED, "why", str(unfinished.path), "", "", "", None),
        PointResult(SPEC, PointState.FAILED, "never began", "", "", "", "", None),
    ]
    table = rollout_table(results)
    assert table.schema == ROLLOUT_SCHEMA
    first, second, third = table.to_pylist()
    assert (first["point"], first["nodes"], first["ended_at_s"], first["run_busy_s"]) == ("nodes-2", 2, 9.0, 0.5)
    assert (first["turns"], first["tokens"], first["worker"], first["server"]) == (2, 7, "w", "s")
    assert (second["status"], second["ended_at_s"], second["eval_busy_s"], second["turns"]) == (
        "cancelled",
        None,
        0.0,
        2,
    )
    assert (third["rollout_id"], third["ended_at_s"]) == ("load-3", None)
    assert rollout_table([]).schema == ROLLOUT_SCHEMA
