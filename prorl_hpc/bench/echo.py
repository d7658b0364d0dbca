"""``python -m prorl_hpc.bench.echo --run-dir DIR --name door|line …``: the bare round trip between two processes.

A report of a worker through a RouterDoor and an order back, encoded, encrypted and decoded as in the service, with
nothing behind the door. What the service adds to this is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from array import array
from pathlib import Path

import msgspec

from prorl_hpc.bench.load_client import due_at_rate
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.control import AgentToCoordinator, CoordinatorToWorker, StageFinished, StartEval
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import Stage
from prorl_hpc.observe.process import Process, favour_the_loop, run_to_end, stop_event, unless_stopped
from prorl_hpc.transport.channels import DealerLine, RouterDoor
from prorl_hpc.transport.keys import RunKeys

_LAST_ANSWERS_S = 2.0
_TICK_S = 0.002


class EchoRecord(msgspec.Struct, frozen=True):
    """Seconds from each message to its answer, in order."""

    round_trips_s: list[float]

    @classmethod
    def read(cls, run: RunDirectory) -> EchoRecord:
        record = read_json(_record_file(run), cls)
        if record is None:
            raise RunError("the echo's line wrote no record")
        return record


def _record_file(run: RunDirectory) -> Path:
    return run.state / "echo.bench.json"


async def serve_door(process: Process) -> None:
    """Answer until told to stop."""
    favour_the_loop()
    stop = stop_event()
    door: RouterDoor[AgentToCoordinator] = RouterDoor(
        AgentToCoordinator, RunKeys.load(process.run.keys), process.runtime_dir / "echo.zmq"
    )
    try:
        process.ready({"zmq_ipc": door.ipc})
        await unless_stopped(_answer(door), stop)
    finally:
        door.close()


async def _answer(door: RouterDoor[AgentToCoordinator]) -> None:
    async for peer, message in door.messages():
        if isinstance(message, StageFinished):
            await door.send(peer, StartEval(message.rollout_id, 1.0))


async def serve_line(process: Process, per_s: float, seconds: float) -> None:
    """Send at a steady rate, whether or not answers come, and note the round trips."""
    favour_the_loop()
    state = await process.wait_for("door", 30)
    line: DealerLine[CoordinatorToWorker] = DealerLine(
        CoordinatorToWorker, RunKeys.load(process.run.keys), state.endpoints["zmq_ipc"], process.name
    )
    sent_at = array("d")
    round_trips_s = array("d")

    async def read() -> None:
        async for message in line.messages():
            if isinstance(message, StartEval):
                round_trips_s.append(time.monotonic() - sent_at[int(message.rollout_id)])

    reader = asyncio.create_task(read())
    try:
        async for due in due_at_rate(per_s, int(per_s * seconds), _TICK_S):
            for _ in range(due):
                sent_at.append(time.monotonic())
                await line.send(StageFinished(process.name, str(len(sent_at) - 1), Stage.RUN))
        await asyncio.sleep(_LAST_ANSWERS_S)
    finally:
        reader.cancel()
        line.close()
    if len(round_trips_s) != len(sent_at):
        raise RunError(f"{len(sent_at)} messages were sent, {len(round_trips_s)} answered")
    write_json(_record_file(process.run), EchoRecord(round_trips_s.tolist()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", choices=("door", "line"), required=True)
    parser.add_argument("--per-s", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    process = Process.start("bench.echo", arguments.run_dir, arguments.name)
    if arguments.name == "door":
        return run_to_end(process, serve_door(process))
    return run_to_end(process, serve_line(process, arguments.per_s, arguments.seconds))


if __name__ == "__main__":
    sys.exit(main())
