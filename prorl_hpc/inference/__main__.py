"""``python -m prorl_hpc.inference --run-dir DIR --name NAME --index I``: the agent of one LLM server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any

from prorl_hpc.inference.agent import InferenceAgent
from prorl_hpc.inference.factory import make_engine
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.control import CoordinatorToInference, ServerRef
from prorl_hpc.messages.errors import ProrlError, TransportError
from prorl_hpc.messages.inference import WorkerToInference
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process, process_arguments, stop_event
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.transport.addresses import node_address
from prorl_hpc.transport.agent_line import AgentLine
from prorl_hpc.transport.channels import RouterDoor, choose_endpoint
from prorl_hpc.transport.keys import RunKeys

log = logging.getLogger("prorl_hpc.inference")


async def serve(process: Process, index: int) -> None:
    """From loading the model to the end of the run; the engine is ended on every way out."""
    stop = stop_event()
    engine = make_engine(process.config, process.run, process.runtime_dir, process.name, index)
    try:
        if await _unless_stopped(_prepare(process, engine), stop):
            await _work(process, engine, stop)
    finally:
        process.say(Phase.STOPPING)
        await engine.stop()


async def _prepare(process: Process, engine: Engine) -> None:
    said = ""

    def progress(detail: str) -> None:
        nonlocal said
        if detail != said:
            process.say(Phase.STARTING, detail)
            said = detail

    await engine.start(progress)
    progress("waiting for the coordinator")
    await process.wait_for("coordinator", process.config.run.start_timeout_s)


async def _work(process: Process, engine: Engine, stop: asyncio.Event) -> None:
    keys = RunKeys.load(process.run.keys)
    plan = read_json(process.run.plan_file, Plan)
    several_nodes = plan is not None and not plan.single_node
    tcp_host = node_address(process.config.cluster.interface) if several_nodes else None
    door: RouterDoor[WorkerToInference] = RouterDoor(
        WorkerToInference, keys, process.runtime_dir / f"{process.name}.sock", tcp_host
    )
    line: AgentLine[CoordinatorToInference] = AgentLine(
        CoordinatorToInference,
        keys,
        process.name,
        lambda: find_coordinator(process),
        heartbeat_s=process.config.rollout.heartbeat_s,
        lost_after_s=process.config.rollout.lost_after_s,
    )
    try:
        server = ServerRef(process.name, process.node, door.ipc, door.tcp)
        agent = InferenceAgent(server, process.config, engine, door, line)
        endpoints = {"zmq_ipc": door.ipc} | ({"zmq_tcp": door.tcp} if door.tcp else {})
        await agent.run(stop, lambda: process.ready(endpoints, engine.description))
    finally:
        line.close()
        door.close()


def find_coordinator(process: Process) -> str:
    """The ZeroMQ endpoint that the coordinator publishes, the Unix socket if it is on this node."""
    state = read_json(process.run.process_state("coordinator"), ProcessState)
    if state is None or "zmq_ipc" not in state.endpoints:
        raise TransportError(f"the coordinator has published no endpoint in {process.run.process_state('coordinator')}")
    return choose_endpoint(process.node, state.node, state.endpoints["zmq_ipc"], state.endpoints.get("zmq_tcp", ""))


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Await ``work``; False if ``stop`` came first, then ``work`` is cancelled."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def main() -> int:
    """Exit code 0 after a requested stop, 1 after anything else, with the reason in the log."""
    arguments = process_arguments("inference")
    process = Process.start("inference", arguments.run_dir, arguments.name)
    try:
        asyncio.run(serve(process, arguments.index))
    except Exception as error:
        expected = isinstance(error, ProrlError | TimeoutError)
        log.error("%s", error, exc_info=None if expected else error)
        process.say(Phase.FAILED, str(error))
        return 1
    process.ended()
    return 0


if __name__ == "__main__":
    sys.exit(main())
