"""Full trajectories on disk: ``rollouts/<batch_id>.parquet``, one row per rollout.

Columns (T = tokens of the trajectory, S = its segments):

==================  ====================  =========================================================================
rollout_id          string                ``{batch_id}.g{row index}.s{sample}``
batch_id            string
batch_elapsed_s     float64               seconds from the batch's order to its end (the same in all its rows)
group_id            string                joins the samples of one prompt
group_row           int32                 the prompt's place in the batch's supply
group_outcome       string                accepted, uniform, broken, cancelled
sample              int32                 counts the samples of a group from 0
row_id              string                the dataset row's ``id``
task                string
status              string                done, failed, timed_out, cancelled
reward              float64, nullable     verified reward; null unless done
failure_stage       string, nullable      init, run, eval; null also for a failure outside any stage
failure_kind        string, nullable      policy, task, sandbox, inference, infrastructure; null if it did not break
failure_message     string, nullable
metrics             map<string, float64>  the task's numbers for people
timings             list<struct>          {stage, queued_s, busy_s}: seconds waited for a slot, seconds spent in it
attempts            int32                 1 unless infrastructure faults made it start again
worker, server      string                who ran it, who generated for it; empty if it came to neither
token_ids           list<int32>           length T
loss_mask           list<bool>            length T; true where the policy generated the token
logprobs            list<float32>         length T, nats, as the engine reported them; 0 where loss_mask is false
segment_lengths     list<int32>           length S, tokens; they add up to T
weight_versions     list<int32>           length S; null where the policy did not generate the segment
messages            list<struct>          {role, content}: the conversation as text, for people
truncated           bool                  a turn was cut at a token limit
==================  ====================  =========================================================================
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchResult, GroupResult
from prorl_hpc.messages.rollout import RolloutResult

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("batch_id", pa.string()),
        ("batch_elapsed_s", pa.float64()),
        ("group_id", pa.string()),
        ("group_row", pa.int32()),
        ("group_outcome", pa.string()),
        ("sample", pa.int32()),
        ("row_id", pa.string()),
        ("task", pa.string()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("failure_stage", pa.string()),
        ("failure_kind", pa.string()),
        ("failure_message", pa.string()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        (
            "timings",
            pa.list_(pa.struct([("stage", pa.string()), ("queued_s", pa.float64()), ("busy_s", pa.float64())])),
        ),
        ("attempts", pa.int32()),
        ("worker", pa.string()),
        ("server", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("segment_lengths", pa.list_(pa.int32())),
        ("weight_versions", pa.list_(pa.int32())),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("truncated", pa.bool_()),
    ],
    metadata={"prorl_rollouts": "1"},
)


class RolloutStore:
    """Writes the batches of one run."""

    def __init__(self, run: RunDirectory) -> None:
        self._directory = run.rollouts

    def path(self, batch_id: str) -> Path:
        """Where a batch goes. Raises ValueError for an id that is no plain file name."""
        if not batch_id or batch_id.startswith(".") or "/" in batch_id or "\0" in batch_id:
            raise ValueError(f"batch_id {batch_id!r} cannot name a file: use letters, digits, '-', '_' and '.'")
        return self._directory / f"{batch_id}.parquet"

    def write_batch(self, batch_id: str, result: BatchResult) -> Path:
        """Write one batch, whole or not at all; an older file of the same id is replaced.

        It takes about a millisecond per rollout: call it off the event loop.
        """
        rows = [
            _row(batch_id, result.elapsed_s, group, rollout) for group in result.groups for rollout in group.rollouts
        ]
        target = self.path(batch_id)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=self._directory, prefix=".batch-", suffix=".part")
        os.close(fd)
        aside = Path(name)
        try:
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), aside, compression="zstd")
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return target


def read_rollouts(run: RunDirectory, columns: list[str] | None = None) -> pa.Table:
    """All batches of the run in one table, ordered by file name; empty if there are none. ``columns`` picks some of
    those above, which spares reading the tokens."""
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    files = sorted(file for file in run.rollouts.glob("*.parquet") if not file.name.startswith("."))
    # One file at a time: a directory with a single odd file must name it.
    tables = [pq.ParquetFile(file).read(columns=columns).cast(schema) for file in files]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _row(batch_id: str, elapsed_s: float, group: GroupResult, rollout: RolloutResult) -> dict[str, Any]:
    trajectory, failure = rollout.trajectory, rollout.failure
    return {
        "rollout_id": rollout.rollout_id,
        "batch_id": batch_id,
        "batch_elapsed_s": elapsed_s,
        "group_id": group.group_id,
        "group_row": group.row_index,
        "group_outcome": group.outcome.value,
        "sample": rollout.sample,
        "row_id": rollout.row_id,
        "task": rollout.task,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "failure_stage": failure.stage.value if failure is not None and failure.stage is not None else None,
        "failure_kind": failure.kind.value if failure is not None else None,
        "failure_message": failure.message if failure is not None else None,
        "metrics": list(rollout.metrics.items()),
        "timings": [{"stage": t.stage.value, "queued_s": t.queued_s, "busy_s": t.busy_s} for t in rollout.timings],
        "attempts": rollout.attempts,
        "worker": rollout.worker,
        "server": rollout.server,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "segment_lengths": [len(segment.token_ids) for segment in trajectory.segments],
        "weight_versions": [segment.weight_version for segment in trajectory.segments],
        "messages": [{"role": message.role, "content": message.content} for message in trajectory.messages],
        "truncated": trajectory.truncated,
    }
