"""``python -m prorl_hpc.bench.idle_server --run-dir DIR --name NAME``: an LLM server for benches whose tasks ask none.

To the coordinator it is an inference agent like any other: it says hello, sends heartbeats, takes every weight version.
"""

from __future__ import annotations

import asyncio
import sys

from prorl_hpc.messages.control import CoordinatorToInference, InferenceHello, ServerLoad, ServerRef, Shutdown
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.observe.process import Process, process_arguments, run_to_end, stop_event, unless_stopped
from prorl_hpc.transport.agent_line import AgentLine, find_coordinator
from prorl_hpc.transport.keys import RunKeys


class IdleServer:
    """One agent line and a weight version."""

    def __init__(self, process: Process, line: AgentLine[CoordinatorToInference]) -> None:
        self._process = process
        self._line = line
        self._version = 0

    async def live(self) -> None:
        """Until the coordinator ends the run. RunError if it is lost."""
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._line.watch(self._hello, self._load))
            group.create_task(self._greet())
            async for message in self._line.messages():
                if isinstance(message, WeightUpdate):
                    self._version = message.version
                    await self._line.send(WeightUpdated(message.version, self._process.name, 0.0))
                elif isinstance(message, Shutdown):
                    watch.cancel()
                    return

    async def _greet(self) -> None:
        await self._line.welcomed.wait()
        self._process.ready()

    def _hello(self) -> InferenceHello:
        name = self._process.name
        ref = ServerRef(name, self._process.node, f"ipc://{self._process.runtime_dir / name}.zmq", "")
        return InferenceHello(ref, "idle", "none", self._version, 4096)

    async def _load(self) -> ServerLoad:
        return ServerLoad(self._process.name, self._version, 0, 0, 0, 0, healthy=True)


async def serve(process: Process) -> None:
    stop = stop_event()
    config = process.config
    waiting = process.wait_for("coordinator", config.run.start_timeout_s)
    if await unless_stopped(waiting, stop) is None:
        return
    line: AgentLine[CoordinatorToInference] = AgentLine(
        CoordinatorToInference,
        RunKeys.load(process.run.keys),
        process.name,
        lambda: find_coordinator(process),
        heartbeat_s=config.rollout.heartbeat_s,
        lost_after_s=config.rollout.lost_after_s,
    )
    try:
        await unless_stopped(IdleServer(process, line).live(), stop)
    finally:
        line.close()


def main() -> int:
    arguments = process_arguments("bench.idle_server")
    process = Process.start("inference", arguments.run_dir, arguments.name)
    return run_to_end(process, serve(process))


if __name__ == "__main__":
    sys.exit(main())
