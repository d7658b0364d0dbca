"""A task whose stages do what the row says: ``{"init": "ok", "run": "hang", "eval": "sandbox"}``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import InferenceError, SandboxError, TransportError
from prorl_hpc.messages.trajectory import Message, ToolCall
from prorl_hpc.sandbox.fake import FakeSandbox
from prorl_hpc.sandbox.protocol import SandboxNeeds
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext

ERRORS: dict[str, BaseException] = {
    "sandbox": SandboxError("the sandbox broke"),
    "inference": InferenceError("the server broke"),
    "infrastructure": TransportError("the line broke"),
    "task": KeyError("a bug"),
    "exit": SystemExit(3),
    "half": ValueError("odd \ud800"),
}


UNSENDABLE: dict[str, Any] = {"huge": 2**80, "long": "x" * 300}

mortal = asyncio.Event()
"""Set: what is immortal may end."""


class StagedTask:
    """RUN takes one turn before it does what the row says."""

    def __init__(self, task: TaskConfig) -> None:
        self._task = task

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{seed}-{i}"} for i in range(size)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        if "bad" in row:
            raise ValueError("field bad is not allowed")

    async def init(self, context: RolloutContext) -> None:
        await context.sandbox.upload("x", b"x")
        await _do(context, "init")

    async def run(self, context: RolloutContext) -> None:
        conversation = context.require_conversation()
        conversation.append([Message("user", "?")])
        context.notes["answer"] = await conversation.generate()
        if "unsendable" in context.spec.row:
            call = ToolCall("f", {"n": UNSENDABLE[context.spec.row["unsendable"]]})
            branch = context.new_conversation()
            branch.append([Message("user", "?"), Message("assistant", "", tool_calls=[call]), Message("user", "?")])
            await branch.generate()
        await _do(context, "run")

    async def eval(self, context: RolloutContext) -> Evaluation:
        await _do(context, "eval")
        if "half_scored" in context.spec.row:
            return Evaluation(0.5, {"\ud800": 1.0})
        return Evaluation(float(context.spec.row.get("reward", 0.5)), {"length": len(context.notes["answer"])})


class FreshTask(StagedTask):
    """Scored where nothing of RUN is."""

    eval_in_fresh_sandbox = True

    async def eval(self, context: RolloutContext) -> Evaluation:
        assert isinstance(context.sandbox, FakeSandbox)
        return Evaluation(0.5, {"files": len(context.sandbox.files), "answer": len(context.notes["answer"])})


class NeedyTask(FreshTask):
    """Its rows say what their sandboxes need."""

    def sandbox(self, row: Mapping[str, Any]) -> SandboxNeeds:
        return SandboxNeeds(image=row["image"], network="host", env={"ROW": row["id"]})


async def _do(context: RolloutContext, stage: str) -> None:
    match context.spec.row.get(stage, "ok"):
        case "ok":
            return
        case "hang":
            await asyncio.Event().wait()
        case "stubborn":
            # Code that swallows its cancellation, as user code does.
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return
        case "immortal":
            # Worse: it goes on for ever.
            while not mortal.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await mortal.wait()
        case kind:
            raise ERRORS[kind]
