"""``python -m prorl_hpc.worker --run-dir DIR --name NAME``: the agent of one CPU node."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.status import Phase
from prorl_hpc.observe.process import (
    Process,
    favour_the_loop,
    process_arguments,
    run_to_end,
    stop_event,
    unless_stopped,
)
from prorl_hpc.sandbox.factory import make_runtime
from prorl_hpc.sandbox.protocol import Runtime
from prorl_hpc.tasks.protocol import wants_gateway
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.transport.agent_line import find_coordinator
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker.agent import Worker
from prorl_hpc.worker.gateway_runs import GatewayRuns, Runs
from prorl_hpc.worker.outside import OutsideRuns
from prorl_hpc.worker.policies import Policy, load_policies

log = logging.getLogger("prorl_hpc.worker")
T = TypeVar("T")


async def serve(process: Process) -> None:
    """From the sandbox check to the end of the run; the runtime is closed on every way out."""
    stop = stop_event()
    policies = load_policies(process.config)
    process.say(Phase.STARTING, "checking the sandbox")
    preparing = make_runtime(process.config.sandbox, process.runtime_dir, process.run.run_id)
    runtime = await unless_stopped(preparing, stop)
    if runtime is None:
        return
    try:
        process.say(Phase.STARTING, "waiting for the coordinator")
        coordinator = process.wait_for("coordinator", process.config.run.start_timeout_s)
        if await unless_stopped(coordinator, stop) is not None:
            await _work(process, runtime, policies, stop)
    finally:
        process.say(Phase.STOPPING)
        await runtime.close()


async def _work(process: Process, runtime: Runtime, policies: Mapping[str, Policy], stop: asyncio.Event) -> None:
    keys = RunKeys.load(process.run.keys)
    clocks = process.config.rollout
    llms = LLMClient(
        process.node,
        keys,
        process.name,
        ping_s=clocks.heartbeat_s,
        lost_after_s=clocks.lost_after_s,
        outside_turn_s=process.config.engine.outside_turn_s,
    )
    try:
        async with _gateway_runs(process) as outside:
            coordinator = functools.partial(find_coordinator, process)
            worker = Worker(
                process.name, process.node, process.config, keys, runtime, llms, policies, coordinator, outside
            )
            favour_the_loop()
            await worker.run(stop, lambda: process.ready(detail=runtime.description))
    finally:
        await llms.close()


@contextlib.asynccontextmanager
async def _gateway_runs(process: Process) -> AsyncIterator[Runs | None]:
    """With agent.kind=outside, or a task whose episodes call the policy over HTTP: the gateway, and what plays through it."""
    agent, task = process.config.agent, process.config.task
    if agent.kind != "outside" and not wants_gateway(get_handler(task.name, task)):
        yield None
        return
    from prorl_hpc.gateway.server import Gateway  # a web server, which the native loop does not need

    socket = process.runtime_dir / f"{process.name}-llm.sock"
    gateway = Gateway(socket)
    await gateway.start()
    try:
        if agent.kind == "outside":
            yield OutsideRuns(agent, socket, gateway.open_session)
        else:
            yield GatewayRuns(task.max_turns, socket, gateway.open_session, agent.max_tokens)
    finally:
        await gateway.close()


def main() -> int:
    arguments = process_arguments("worker")
    process = Process.start("worker", arguments.run_dir, arguments.name)
    return run_to_end(process, serve(process))


if __name__ == "__main__":
    sys.exit(main())
