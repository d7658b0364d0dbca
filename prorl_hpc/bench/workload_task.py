"""The task of the scaling runs: real sandboxes and real tool calls that sleep as the row says, turns from the engine.

What the model writes is not read: each turn is as many tokens as the row wants (an engine that ends a turn by itself makes
it shorter), and each is answered by a tool call. Numbers for people in the rollout's metrics: ``turns``, ``short_turns``
(those with fewer tokens than the row wants), ``tool_calls``, ``tool_s`` (seconds in tool calls), ``tool_asked_s`` (what they
were told to sleep), ``llm_s`` (seconds in turns).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from prorl_hpc.bench.recorded_rollouts import SYSTEM, listing
from prorl_hpc.bench.workload_recorded import recorded_rows
from prorl_hpc.bench.workload_rows import WorkloadRow, draw_rows, read_kinds
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError, SandboxError
from prorl_hpc.messages.trajectory import Finish, Message
from prorl_hpc.sandbox.protocol import ToolResult
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext
from prorl_hpc.tasks.registry import check_options

TASK_NAME = "prorl_hpc.bench.workload_task:WorkloadTask"
_OBSERVATION = "observation.txt"
_CHARS_A_TOKEN = 1.6
"""Of listings, with SmolLM2's tokenizer: a task does not know which one the run has."""


class WorkloadTask:
    """Implements tasks.protocol.AgentHandler. ``task.options``: ``kinds`` (workload_rows.Kind by name), or ``recorded``: the
    directory of a run whose rollouts are played again. Rows: workload_rows.WorkloadRow."""

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ("kinds", "recorded"))
        self._task = task
        self._recorded = str(task.options.get("recorded") or "")
        kinds = task.options.get("kinds")
        if self._recorded and kinds:
            raise ConfigError(
                "task.options.recorded and task.options.kinds: both say what rollouts take, give one of them"
            )
        self._kinds = read_kinds(kinds) if kinds else []

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        if self._recorded:
            rows = recorded_rows(self._recorded, size)
        else:
            rows = list(draw_rows(self._kinds or read_kinds(None), size, seed, split))
        return [msgspec.to_builtins(row) for row in rows]

    def check_row(self, row: Mapping[str, Any]) -> None:
        wanted = WorkloadRow.of(row)
        number, longest = max(enumerate((turn.tokens for turn in wanted.turns), 1), key=lambda turn: turn[1])
        if longest > self._task.max_turn_tokens:
            asked = "task.options.recorded" if self._recorded else f"task.options.kinds.{wanted.kind}.turn_tokens"
            raise ValueError(
                f"its turn {number} of {len(wanted.turns)} is to have {longest} tokens, and "
                f"task.max_turn_tokens={self._task.max_turn_tokens} is the most that a turn can have: raise it (and "
                f"model.max_context_tokens to hold all turns), or ask for fewer tokens ({asked})"
            )

    async def init(self, context: RolloutContext) -> None:
        row = WorkloadRow.of(context.spec.row)
        await context.sandbox.upload(_OBSERVATION, _text(row.id, row.observation_chars).encode())
        await _sleep(context, row.init_s)

    async def run(self, context: RolloutContext) -> None:
        row, conversation = WorkloadRow.of(context.spec.row), context.require_conversation()
        began, factor = time.monotonic(), row.factor(context.spec.sample)
        numbers = context.notes["numbers"] = dict.fromkeys(
            ("turns", "short_turns", "tool_calls", "tool_s", "tool_asked_s", "llm_s"), 0.0
        )
        prompt = _text(f"{row.id} prompt", round(row.prompt_tokens * _CHARS_A_TOKEN))
        messages = [Message("system", SYSTEM), Message("user", f"Work on {row.id}.\n{prompt}")]
        for number, turn in enumerate(row.turns, 1):
            before, asked = conversation.last_turn, time.monotonic()
            conversation.append(messages)
            await conversation.generate(max_tokens=turn.tokens)
            numbers["llm_s"] += time.monotonic() - asked
            answer = conversation.last_turn
            if answer is None or answer is before or conversation.truncated:
                raise ValueError(
                    f"turn {number} of {len(row.turns)} does not fit ({conversation.finish}): raise "
                    "model.max_context_tokens and task.max_turn_tokens, or make the workload smaller (task.options.kinds)"
                )
            numbers["turns"] += 1
            numbers["short_turns"] += len(answer.token_ids) < turn.tokens
            paced_s = row.run_s * number / len(row.turns) - (time.monotonic() - began)
            result = await self._tool_call(context, max(turn.tool_s * factor, paced_s), numbers)
            messages = [Message("user", f"Output:\n{result.output}")]
        conversation.end(Finish.ANSWER)

    async def eval(self, context: RolloutContext) -> Evaluation:
        row = WorkloadRow.of(context.spec.row)
        await _sleep(context, row.eval_s * row.factor(context.spec.sample))
        reward = 1.0 if row.uniform else float(context.spec.sample % 2)
        return Evaluation(reward, context.notes["numbers"])

    async def _tool_call(self, context: RolloutContext, seconds: float, numbers: dict[str, float]) -> ToolResult:
        """``seconds`` of sleep in the rollout's own shell, then the observation as output."""
        sleep = f"sleep {seconds:.3f}; " if seconds > 0 else ""
        began = time.monotonic()
        limit_s = seconds + self._task.call_timeout_s
        result = await context.sandbox.call("bash", {"command": f"{sleep}cat {_OBSERVATION}"}, limit_s)
        if result.exit_code != 0:
            raise SandboxError(
                f"a tool call of the workload failed (exit code {result.exit_code}): {result.output[-500:]}"
            )
        numbers["tool_calls"] += 1
        numbers["tool_s"] += time.monotonic() - began
        numbers["tool_asked_s"] += max(0.0, seconds)
        return result


async def _sleep(context: RolloutContext, seconds: float) -> None:
    """As a program in the sandbox."""
    if seconds > 0:
        began = time.monotonic()
        result = await context.sandbox.exec(["sleep", f"{seconds:.3f}"], seconds + 60.0)
        if result.exit_code != 0:
            raise SandboxError(f"sleep failed in the sandbox (exit code {result.exit_code}): {result.output[-500:]}")
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))


def _text(name: str, chars: int) -> str:
    """So many ASCII characters of text, another for every ``name``."""
    return listing(name, chars // 20 + 1)[:chars].encode("ascii", "replace").decode()
