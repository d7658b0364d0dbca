from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, Stage, StageTiming, Status
from prorl_hpc.messages.trajectory import Finish, Message, Segment, ToolCall, Trajectory
from prorl_hpc.observe.rollout_store import SCHEMA, RolloutStore, StoredRollout, read_rollouts

DONE = RolloutResult(
    rollout_id="step-1.g0.s0",
    group_id="step-1.g0",
    sample=0,
    task="file_quest",
    status=Status.DONE,
    reward=1.0,
    metrics={"turns": 2.0, "tool_calls": 1.0},
    trajectory=Trajectory(
        segments=[
            Segment([1, 2, 3]),
            Segment([4, 5], logprobs=[-0.5, -0.25], trained=True, weight_version=7),
        ],
        messages=[Message("user", "wie viele?"), Message("assistant", "zwölf")],
    ),
    timings=[StageTiming(Stage.RUN, 0.5, 1.5)],
    worker="worker-0",
    server="inference-0",
    row_id="train-17",
)
BROKEN = RolloutResult(
    rollout_id="step-1.g0.s1",
    group_id="step-1.g0",
    sample=1,
    task="file_quest",
    status=Status.FAILED,
    failure=Failure(Stage.INIT, FailureKind.SANDBOX, "no namespace"),
    attempts=3,
)


def batch(*rollouts: RolloutResult) -> BatchResult:
    progress = BatchProgress("step-1", BatchState.DONE, 1, 1, 0, 0, 0, 1, 1, 1)
    group = GroupResult("step-1.g0", 0, GroupOutcome.ACCEPTED, list(rollouts))
    return BatchResult(progress, [group] if rollouts else [], 12.5)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    path = RolloutStore(run).write_batch("step-1", batch(DONE, BROKEN))
    assert path == run.rollouts / "step-1.parquet"
    done, broken = read_rollouts(run).to_pylist()
    assert done["token_ids"] == [1, 2, 3, 4, 5]
    assert done["loss_mask"] == [False, False, False, True, True]
    assert done["logprobs"] == [0, 0, 0, -0.5, -0.25]
    assert done["segment_lengths"] == [3, 2] and done["weight_versions"] == [None, 7]
    assert done["messages"][1] == {
        "role": "assistant",
        "content": "zwölf",
        "name": "",
        "call_id": "",
        "tool_calls": [],
        "reasoning": "",
    }
    assert (done["finish"], done["branches"]) == ("", [])
    assert dict(done["metrics"]) == {"turns": 2.0, "tool_calls": 1.0}
    assert done["timings"] == [{"stage": "run", "queued_s": 0.5, "busy_s": 1.5}]
    assert (done["reward"], done["failure_kind"], done["group_outcome"]) == (1.0, None, "accepted")
    assert (broken["reward"], broken["failure_stage"], broken["failure_kind"]) == (None, "init", "sandbox")
    assert broken["attempts"] == 3 and broken["token_ids"] == []
    assert done["batch_elapsed_s"] == broken["batch_elapsed_s"] == 12.5


def test_batches_join_in_order_and_a_repeated_one_replaces(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    store = RolloutStore(run)
    store.write_batch("b", batch(DONE))
    store.write_batch("a", batch(BROKEN))
    store.write_batch("b", batch(DONE, BROKEN))
    assert read_rollouts(run)["batch_id"].to_pylist() == ["a", "b", "b"]


def test_empty_batches_and_empty_runs_keep_the_columns(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_rollouts(run).schema.equals(SCHEMA)
    RolloutStore(run).write_batch("nothing", batch())
    table = read_rollouts(run)
    assert table.num_rows == 0 and table.schema.equals(SCHEMA)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("prorl_hpc.observe.rollout_store.pq.ParquetWriter.write_table", full_disk)
    with pytest.raises(OSError, match="No space"):
        RolloutStore(run).write_batch("step-1", batch(DONE))
    assert list(run.rollouts.iterdir()) == []


@pytest.mark.parametrize("batch_id", ["", "../escape", ".hidden", "a/b", "a\0b", "a~1", "x" * 201, "single-7"])
def test_ids_that_are_no_file_names_are_refused(tmp_path: Path, batch_id: str) -> None:
    with pytest.raises(ValueError, match="batch_id"):
        RolloutStore(RunDirectory(tmp_path)).write_batch(batch_id, batch(DONE))


def test_odd_numbers_survive(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    RolloutStore(run).write_batch("b", batch(msgspec.structs.replace(DONE, metrics={"x": math.inf}, reward=-0.5)))
    (row,) = read_rollouts(run).to_pylist()
    assert row["reward"] == -0.5 and dict(row["metrics"]) == {"x": math.inf}


def rows_of(count: int, tokens: int = 3) -> list[StoredRollout]:
    rows = []
    for i in range(count):
        segments = [Segment([i] * tokens), Segment([7], logprobs=[-0.5], trained=True, weight_version=i)]
        result = msgspec.structs.replace(DONE, rollout_id=f"r{i}")
        rows.append(StoredRollout(result, Trajectory(segments, [Message("user", str(i))], i % 2 == 0), cursor=i + 1))
    return rows


def test_single_trajectories_are_read_back_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_hpc.observe.rollout_store.ROW_GROUP_ROLLOUTS", 4)
    store = RolloutStore(RunDirectory(tmp_path))
    rows = rows_of(10)
    file = store.begin_singles(1, epoch=1)
    places = [file.add(row) for row in rows]
    assert not list(store.path("x").parent.glob("*.parquet"))  # not before it is whole
    path = file.finish()
    assert path.name == "single-1.parquet" and places[9] == (2, 1)
    assert pq.ParquetFile(path).num_row_groups == 3
    wanted = [9, 0, 5]
    assert store.read(path.name, [places[i] for i in wanted]) == [rows[i].trajectory for i in wanted]


def test_long_trajectories_make_small_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_hpc.observe.rollout_store.ROW_GROUP_TOKENS", 100)
    file = RolloutStore(RunDirectory(tmp_path)).begin_singles(1, epoch=1)
    assert [file.add(row) for row in rows_of(3, tokens=60)] == [(0, 0), (0, 1), (1, 0)]
    file.abandon()
    assert list(RunDirectory(tmp_path).rollouts.iterdir()) == []


def test_odd_trajectories_are_read_back(tmp_path: Path) -> None:
    store = RolloutStore(RunDirectory(tmp_path))
    empty_turn = Segment([], logprobs=[], trained=True, weight_version=3)
    odd = [
        Trajectory(),
        Trajectory([Segment([]), empty_turn], [], truncated=True),
        Trajectory([empty_turn, Segment([1]), Segment([2], [-1.0], True, None), Segment([3, 4])]),
    ]
    file = store.begin_batch("b", epoch=1)
    places = [file.add(StoredRollout(DONE, trajectory, "b")) for trajectory in odd]
    assert store.read(file.finish().name, places) == odd


def test_branches_and_what_messages_say_are_read_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    call = ToolCall("bash", {"command": "ls 'ä'", "n": [1, None]}, "call_1")
    answer = Message("assistant", "so", tool_calls=[call, ToolCall("finish")], reasoning="hm")
    messages = [Message("user", "p"), answer, Message("tool", "out", "bash", "call_1")]
    branches = [
        Trajectory(
            [Segment([1, 2]), Segment([3], [-0.5], True, 7), Segment([4], [-0.25], True, 8)],
            messages,
            True,
            Finish.CONTEXT,
        ),
        Trajectory([Segment([9]), Segment([5, 6], [-1.0, -2.0], True, 7)], [], finish=Finish.ENVIRONMENT),
        Trajectory(),
    ]
    whole = Trajectory(DONE.trajectory.segments, messages, finish=Finish.ANSWER, branches=branches)
    store = RolloutStore(run)
    file = store.begin_batch("b", epoch=1)
    places = [file.add(StoredRollout(DONE, trajectory, "b")) for trajectory in (whole, Trajectory())]
    assert store.read(file.finish().name, places) == [whole, Trajectory()]
    row = read_rollouts(run).to_pylist()[0]
    assert row["finish"] == "answer" and row["branches"][0]["finish"] == "context"
    assert row["branches"][0]["token_ids"] == [1, 2, 3, 4]
    assert row["branches"][0]["loss_mask"] == [False, False, True, True]
    assert row["branches"][0]["logprobs"] == [0, 0, -0.5, -0.25]
    assert row["messages"][1]["tool_calls"][0] == {
        "name": "bash",
        "arguments": '{"command": "ls \'ä\'", "n": [1, null]}',
        "call_id": "call_1",
    }


def test_tokens_of_branches_count_for_the_size_of_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_hpc.observe.rollout_store.ROW_GROUP_TOKENS", 100)
    long = Trajectory([Segment([1])], branches=[Trajectory([Segment([1] * 99)])])
    file = RolloutStore(RunDirectory(tmp_path)).begin_singles(1, epoch=1)
    assert [file.add(StoredRollout(DONE, long)) for _ in range(2)] == [(0, 0), (1, 0)]
    file.abandon()


def test_files_of_version_2_are_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    store = RolloutStore(run)
    path = store.write_batch("b", batch(DONE))
    table = pq.read_table(path)
    old_type = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    plain = [[{"role": m["role"], "content": m["content"]} for m in row] for row in table["messages"].to_pylist()]
    at = table.column_names.index("messages")
    old = table.set_column(at, "messages", pa.array(plain, type=old_type)).drop_columns(
        ["finish", "branches", "policy"]
    )
    pq.write_table(old.replace_schema_metadata({"prorl_rollouts": "2"}), path)
    (row,) = read_rollouts(run).to_pylist()
    assert row["messages"][1]["content"] == "zwölf" and row["messages"][1]["reasoning"] is None
    assert (row["finish"], row["branches"], row["policy"]) == (None, None, None)
    assert store.read(path.name, [(0, 0)]) == [DONE.trajectory]


def test_a_batch_of_an_older_epoch_is_kept_beside(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    store = RolloutStore(run)
    for epoch, result in ((1, batch(DONE)), (1, batch(BROKEN)), (3, batch(DONE, BROKEN))):
        store.write_batch("b", result, epoch)
    assert sorted(path.name for path in run.rollouts.iterdir()) == ["b.parquet", "b~1.parquet"]
    assert read_rollouts(run, ["status"])["status"].to_pylist() == ["done", "failed", "failed"]


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    path = RolloutStore(run).write_batch("b", batch(DONE))
    old = pq.read_table(path).drop_columns(["cursor", "carried_from"]).replace_schema_metadata({"prorl_rollouts": "1"})
    pq.write_table(old, path)
    (row,) = read_rollouts(run).to_pylist()
    assert (row["cursor"], row["carried_from"], row["token_ids"]) == (None, None, [1, 2, 3, 4, 5])
    assert read_rollouts(run, ["cursor", "status"]).column_names == ["cursor", "status"]
    pq.write_table(old.replace_schema_metadata({"prorl_rollouts": "99"}), path)
    with pytest.raises(ValueError, match=r"b\.parquet is of version 99"):
        read_rollouts(run)


def test_what_a_killed_process_left_is_cleared_and_never_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    store = RolloutStore(run)
    store.write_batch("b", batch(DONE))
    torn = run.rollouts / ".rollouts-1.part"
    torn.write_bytes(b"PAR1")
    assert read_rollouts(run, ["status"]).num_rows == 1
    store.clear_aside()
    assert not torn.exists()
