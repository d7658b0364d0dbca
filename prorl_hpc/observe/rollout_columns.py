"""Rollouts as Arrow columns, and back: encoded with numpy column by column, a few dozen rollouts at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prorl_hpc.messages.batch import GroupOutcome
from prorl_hpc.messages.rollout import RolloutResult
from prorl_hpc.messages.trajectory import Message, Segment, Trajectory

VERSION = 3
SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("batch_id", pa.string()),
        ("batch_elapsed_s", pa.float64()),
        ("group_id", pa.string()),
        ("group_row", pa.int32()),
        ("group_outcome", pa.string()),
        ("carried_from", pa.string()),
        ("sample", pa.int32()),
        ("row_id", pa.string()),
        ("task", pa.string()),
        ("policy", pa.string()),
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
        ("cursor", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("segment_lengths", pa.list_(pa.int32())),
        ("weight_versions", pa.list_(pa.int32())),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("truncated", pa.bool_()),
    ],
    metadata={"prorl_rollouts": str(VERSION)},
)
TRAJECTORY_COLUMNS = [
    "token_ids",
    "loss_mask",
    "logprobs",
    "segment_lengths",
    "weight_versions",
    "messages",
    "truncated",
]
_BY_TOKEN = ("token_ids", "loss_mask", "logprobs")


@dataclass(frozen=True)
class GroupPlace:
    """What a batch's file says of a rollout's group; the fields are GroupResult's."""

    row_index: int
    outcome: GroupOutcome
    carried_from: str = ""


@dataclass(frozen=True)
class StoredRollout:
    """A row to be. ``trajectory`` stands in place of the result's own. ``cursor`` is the result's number in the
    journal."""

    result: RolloutResult
    trajectory: Trajectory
    batch_id: str = ""
    batch_elapsed_s: float | None = None
    group: GroupPlace | None = None
    cursor: int | None = None


class RowGroup:
    """Rollouts that become one row group of a file."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_tokens = 0
        self._values: dict[str, list[Any]] = {name: [] for name in SCHEMA.names if name not in _BY_TOKEN}
        self._lengths: list[int] = []
        self._by_token: dict[str, list[np.ndarray]] = {name: [] for name in _BY_TOKEN}

    def add(self, row: StoredRollout) -> None:
        """Takes the token lists into arrays at once, so that only one rollout's are ever held."""
        for name, value in _plain_values(row).items():
            self._values[name].append(value)
        length = 0
        for segment in row.trajectory.segments:
            n = len(segment.token_ids)
            logprobs = segment.logprobs if segment.trained else None
            self._by_token["token_ids"].append(np.array(segment.token_ids, dtype=np.int32))
            self._by_token["loss_mask"].append(np.full(n, segment.trained, dtype=np.bool_))
            self._by_token["logprobs"].append(
                np.zeros(n, dtype=np.float32) if logprobs is None else np.array(logprobs, dtype=np.float32)
            )
            length += n
        self._lengths.append(length)
        self.num_rows += 1
        self.num_tokens += length

    def table(self) -> pa.Table:
        offsets = pa.array(np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int32))
        arrays = []
        for field in SCHEMA:
            if field.name in _BY_TOKEN:
                pieces = self._by_token[field.name]
                values = np.concatenate(pieces) if pieces else np.empty(0)
                values_array = pa.array(values, type=field.type.value_type)
                arrays.append(pa.ListArray.from_arrays(offsets, values_array, type=field.type))
            else:
                arrays.append(pa.array(self._values[field.name], type=field.type))
        return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _plain_values(row: StoredRollout) -> dict[str, Any]:
    rollout, trajectory, group, failure = row.result, row.trajectory, row.group, row.result.failure
    return {
        "rollout_id": rollout.rollout_id,
        "batch_id": row.batch_id,
        "batch_elapsed_s": row.batch_elapsed_s,
        "group_id": rollout.group_id,
        "group_row": group.row_index if group is not None else None,
        "group_outcome": group.outcome.value if group is not None else None,
        "carried_from": group.carried_from if group is not None else "",
        "sample": rollout.sample,
        "row_id": rollout.row_id,
        "task": rollout.task,
        "policy": rollout.policy,
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
        "cursor": row.cursor,
        "segment_lengths": [len(segment.token_ids) for segment in trajectory.segments],
        "weight_versions": [segment.weight_version for segment in trajectory.segments],
        "messages": [{"role": message.role, "content": message.content} for message in trajectory.messages],
        "truncated": trajectory.truncated,
    }


def trajectory_at(table: pa.Table, row: int) -> Trajectory:
    """The trajectory in ``row`` of a table with TRAJECTORY_COLUMNS; its logprobs are rounded to float32."""

    def column(name: str) -> Any:
        return table.column(name)[row]

    tokens, mask, logprobs = (column(name).values.to_numpy(zero_copy_only=False) for name in _BY_TOKEN)
    segments, start = [], 0
    versions = column("weight_versions").as_py()
    for length, version in zip(column("segment_lengths").as_py(), versions, strict=True):
        end = start + length
        trained = bool(mask[start]) if length else version is not None
        segments.append(
            Segment(
                token_ids=tokens[start:end].tolist(),
                logprobs=logprobs[start:end].tolist() if trained else None,
                trained=trained,
                weight_version=version,
            )
        )
        start = end
    messages = [Message(message["role"], message["content"]) for message in column("messages").as_py()]
    return Trajectory(segments, messages, column("truncated").as_py())
