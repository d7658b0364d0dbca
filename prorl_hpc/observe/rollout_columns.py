"""Rollouts as Arrow columns, and back: encoded with numpy column by column, a few dozen rollouts at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prorl_hpc.messages.batch import GroupOutcome
from prorl_hpc.messages.rollout import RolloutResult
from prorl_hpc.messages.trajectory import Finish, Message, Segment, ToolCall, Trajectory

VERSION = 3
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("name", pa.string()),
        ("call_id", pa.string()),
        (
            "tool_calls",
            pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string()), ("call_id", pa.string())])),
        ),
        ("reasoning", pa.string()),
    ]
)
_CONVERSATION = [
    ("token_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("logprobs", pa.list_(pa.float32())),
    ("segment_lengths", pa.list_(pa.int32())),
    ("weight_versions", pa.list_(pa.int32())),
    ("messages", pa.list_(_MESSAGE)),
    ("truncated", pa.bool_()),
    ("finish", pa.string()),
]
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
        *_CONVERSATION,
        ("branches", pa.list_(pa.struct(_CONVERSATION))),
    ],
    metadata={"prorl_rollouts": str(VERSION)},
)
TRAJECTORY_COLUMNS = [*(name for name, _ in _CONVERSATION), "branches"]
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
        for values in _token_arrays(row.trajectory):
            for name, array in zip(_BY_TOKEN, values, strict=True):
                self._by_token[name].append(array)
            length += len(values[0])
        self._lengths.append(length)
        self.num_rows += 1
        self.num_tokens += sum(part.num_tokens for part in row.trajectory.conversations)

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
        **_by_conversation(trajectory),
        "branches": [_branch_values(branch) for branch in trajectory.branches],
    }


def _token_arrays(trajectory: Trajectory) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Ids, mask and logprobs of each segment."""
    for segment in trajectory.segments:
        n = len(segment.token_ids)
        logprobs = segment.logprobs if segment.trained else None
        yield (
            np.array(segment.token_ids, dtype=np.int32),
            np.full(n, segment.trained, dtype=np.bool_),
            np.zeros(n, dtype=np.float32) if logprobs is None else np.array(logprobs, dtype=np.float32),
        )


def _branch_values(branch: Trajectory) -> dict[str, Any]:
    columns = list(zip(*_token_arrays(branch), strict=True)) or [(np.empty(0),)] * len(_BY_TOKEN)
    arrays = {name: np.concatenate(parts) for name, parts in zip(_BY_TOKEN, columns, strict=True)}
    return {**arrays, **_by_conversation(branch)}


def _by_conversation(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "segment_lengths": [len(segment.token_ids) for segment in trajectory.segments],
        "weight_versions": [segment.weight_version for segment in trajectory.segments],
        "messages": [_message_values(message) for message in trajectory.messages],
        "truncated": trajectory.truncated,
        "finish": trajectory.finish.value,
    }


def _message_values(message: Message) -> dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False), "call_id": call.call_id}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "call_id": message.call_id,
        "tool_calls": calls,
        "reasoning": message.reasoning,
    }


def trajectory_at(table: pa.Table, row: int) -> Trajectory:
    """The trajectory in ``row`` of a table with TRAJECTORY_COLUMNS, or with those of an older version; its logprobs are
    rounded to float32."""
    values = {name: table.column(name)[row] for name in TRAJECTORY_COLUMNS if name in table.column_names}
    branches = values.pop("branches").as_py() if "branches" in values else None
    arrays = {name: values[name].values.to_numpy(zero_copy_only=False) for name in _BY_TOKEN}
    whole = {name: value.as_py() for name, value in values.items() if name not in _BY_TOKEN} | arrays
    return _read_conversation(whole, [_read_branch(branch) for branch in branches or []])


def _read_branch(values: dict[str, Any]) -> Trajectory:
    return _read_conversation(values | {name: np.array(values[name]) for name in _BY_TOKEN}, [])


def _read_conversation(values: dict[str, Any], branches: list[Trajectory]) -> Trajectory:
    tokens, mask, logprobs = (values[name] for name in _BY_TOKEN)
    segments, start = [], 0
    for length, version in zip(values["segment_lengths"], values["weight_versions"], strict=True):
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
    messages = [_read_message(message) for message in values["messages"]]
    return Trajectory(segments, messages, values["truncated"], Finish(values.get("finish") or ""), branches)


def _read_message(values: dict[str, Any]) -> Message:
    """Older files have ``role`` and ``content`` alone."""
    calls = [
        ToolCall(call["name"], json.loads(call["arguments"]), call["call_id"])
        for call in values.get("tool_calls") or []
    ]
    return Message(
        values["role"],
        values["content"],
        values.get("name") or "",
        values.get("call_id") or "",
        calls,
        values.get("reasoning") or "",
    )
