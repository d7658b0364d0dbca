"""``python -m prorl_hpc.bench.noop_worker --run-dir DIR --name NAME``: the real worker around sandboxes that are none.

On its way out it writes ``<run>/state/<name>.bench.json`` (WorkerRecord) for the bench that started it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.bench import timed_task
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import InferenceError, RunError, SandboxError
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.observe.process import (
    Process,
    favour_the_loop,
    process_arguments,
    run_to_end,
    stop_event,
    unless_stopped,
)
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, SandboxStats, ToolResult
from prorl_hpc.transport.agent_line import find_coordinator
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker.agent import Worker
from prorl_hpc.worker.policies import load_policies

_LOOK_S = 0.02


class WorkerRecord(msgspec.Struct, frozen=True):
    """What one worker process saw. ``acknowledged_at``: when it last had nothing left that was not acknowledged,
    to 20 ms; by time.monotonic(), which all processes of a Linux machine share. 0 if there was never anything."""

    stage_delays_s: list[float]
    acknowledged: int
    acknowledged_at: float

    @classmethod
    def read(cls, run: RunDirectory, name: str) -> WorkerRecord:
        """RunError if the process did not end in order."""
        record = read_json(record_file(run, name), cls)
        if record is None:
            raise RunError(f"{name} wrote no record: it did not end in order")
        return record


def record_file(run: RunDirectory, name: str) -> Path:
    return run.state / f"{name}.bench.json"


class NoSandbox:
    """Implements sandbox.protocol.Sandbox; nothing can be done in it."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.sandbox_id = spec.sandbox_id

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        raise SandboxError("the benches' sandbox runs no tools")

    async def exec(self, argv: Sequence[str], timeout_s: float, *, cwd: str = "", stdin: bytes = b"") -> ToolResult:
        raise SandboxError("the benches' sandbox runs no programs")

    async def upload(self, path: str, content: bytes) -> None:
        raise SandboxError("the benches' sandbox keeps no files")

    async def download(self, path: str) -> bytes:
        raise SandboxError("the benches' sandbox keeps no files")

    async def stats(self) -> SandboxStats:
        raise SandboxError("the benches' sandbox uses nothing")

    async def stop(self) -> None:
        pass


class NoRuntime:
    """Implements sandbox.protocol.Runtime. Unlike the tests' fake it remembers nothing: a bench starts a million."""

    description = "none (bench)"

    async def prepare(self) -> None:
        pass

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return NoSandbox(spec)

    async def close(self) -> None:
        pass


class NoLLM:
    """Implements worker.llms.LLMSource and MovableLLM: it must not be asked."""

    def for_rollout(
        self, server: ServerRef, rollout_id: str, priority: int, trouble: Callable[[str, str], None] | None
    ) -> NoLLM:
        return self

    def move(self, server: ServerRef | None) -> None:
        pass

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        raise InferenceError("the benches' task asks no LLM")


class NoopWorker(Worker):
    """Notes when the last report that it kept was acknowledged."""

    all_acknowledged_at = 0.0

    async def note_acknowledgements(self) -> None:
        """For ever."""
        kept = False
        while True:
            if self._outbox.unacknowledged:
                kept = True
            elif kept:
                kept, self.all_acknowledged_at = False, time.monotonic()
            await asyncio.sleep(_LOOK_S)

    @property
    def record(self) -> WorkerRecord:
        acknowledged = timed_task.evaluations - len(self._outbox.unacknowledged)
        return WorkerRecord(timed_task.stage_delays_s.tolist(), acknowledged, self.all_acknowledged_at)


async def serve(process: Process) -> None:
    stop = stop_event()
    config = process.config
    waiting = process.wait_for("coordinator", config.run.start_timeout_s)
    if await unless_stopped(waiting, stop) is None:
        return
    worker = NoopWorker(
        process.name,
        process.node,
        config,
        RunKeys.load(process.run.keys),
        NoRuntime(),
        NoLLM(),
        load_policies(config),
        lambda: find_coordinator(process),
    )
    favour_the_loop()
    looking = asyncio.create_task(worker.note_acknowledgements())
    try:
        await worker.run(stop, process.ready)
    finally:
        looking.cancel()
        write_json(record_file(process.run, process.name), worker.record)


def main() -> int:
    arguments = process_arguments("bench.noop_worker")
    process = Process.start("worker", arguments.run_dir, arguments.name)
    return run_to_end(process, serve(process))


if __name__ == "__main__":
    sys.exit(main())
