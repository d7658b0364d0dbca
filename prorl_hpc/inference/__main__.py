"""``python -m prorl_hpc.inference --run-dir DIR --name NAME --index I``: the agent of one LLM server."""

from __future__ import annotations

import asyncio
import logging

from prorl_hpc.config.policies import policy_of_server
from prorl_hpc.inference.agent import InferenceAgent
from prorl_hpc.inference.factory import make_engine, make_member
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.inference.request_records import RequestRecords
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.control import CoordinatorToInference, ServerRef
from prorl_hpc.messages.inference import WorkerToInference
from prorl_hpc.messages.status import Phase
from prorl_hpc.observe.process import Process, exit_at_once, process_arguments, run_to_end, stop_event, unless_stopped
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.transport.addresses import node_address
from prorl_hpc.transport.agent_line import AgentLine, find_coordinator
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys

log = logging.getLogger("prorl_hpc.inference")


async def serve(process: Process, index: int) -> None:
    """From loading the model to the end of the run; the engine is ended on every way out."""
    stop = stop_event()
    engine = make_engine(process.config, process.run, process.runtime_dir, process.name, index)
    try:
        if await unless_stopped(_prepare(process, engine), stop):
            await _work(process, engine, policy_of_server(process.config, index), stop)
    finally:
        process.say(Phase.STOPPING)
        await engine.stop()


async def _prepare(process: Process, engine: Engine) -> bool:
    said = ""

    def progress(detail: str) -> None:
        nonlocal said
        if detail != said:
            process.say(Phase.STARTING, detail)
            said = detail

    await engine.start(progress)
    progress("waiting for the coordinator")
    await process.wait_for("coordinator", process.config.run.start_timeout_s)
    return True


async def _work(process: Process, engine: Engine, policy: str, stop: asyncio.Event) -> None:
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
    records = None
    if process.config.engine.record_requests:
        records = RequestRecords(process.run.requests / f"{process.name}.jsonl", engine.description, process.node)
    try:
        server = ServerRef(process.name, process.node, door.ipc, door.tcp, policy, vocab_size=engine.model.vocab_size)
        agent = InferenceAgent(server, process.config, engine, door, line, records)
        endpoints = {"zmq_ipc": door.ipc} | ({"zmq_tcp": door.tcp} if door.tcp else {})
        await agent.run(stop, lambda: process.ready(endpoints, engine.description))
    finally:
        line.close()
        door.close()
        if records is not None:
            records.close()


async def serve_member(process: Process, index: int, rank: int) -> None:
    """A further node of a server that is spread over several: it has no door, and is ready when the server is."""
    stop = stop_event()
    member = make_member(process.config, process.run, process.runtime_dir, process.name, index, rank)

    phase = Phase.STARTING

    def say(detail: str) -> None:
        process.say(phase, detail)

    async def work() -> None:
        nonlocal phase
        serving = asyncio.create_task(member.serve(say))
        leader = asyncio.create_task(process.wait_for(f"inference-{index}", process.config.run.start_timeout_s))
        try:
            await asyncio.wait({serving, leader}, return_when=asyncio.FIRST_COMPLETED)
            if leader.done():
                leader.result()
                phase = Phase.READY
                say(f"node {rank + 1} of inference-{index}")
            await serving
        finally:
            for task in (serving, leader):
                task.cancel()
            await asyncio.gather(serving, leader, return_exceptions=True)

    try:
        await unless_stopped(work(), stop)
    finally:
        process.say(Phase.STOPPING)
        await member.stop()


def main() -> int:
    arguments = process_arguments("inference")
    process = Process.start("inference", arguments.run_dir, arguments.name)
    if arguments.rank > 0:
        return run_to_end(process, serve_member(process, arguments.index, arguments.rank))
    return run_to_end(process, serve(process, arguments.index))


if __name__ == "__main__":
    exit_at_once(main())
