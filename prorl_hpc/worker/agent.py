"""The CPU node's agent: takes the coordinator's orders, runs stages, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping

from prorl_hpc.config.schema import ProrlConfig, RolloutConfig, TaskConfig
from prorl_hpc.core.balancer import PER_REQUEST
from prorl_hpc.messages.control import (
    Acknowledge,
    CoordinatorToWorker,
    Discard,
    Draining,
    Goodbye,
    MoveRun,
    Pools,
    RequestServers,
    Shutdown,
    StartEval,
    StartInit,
    StartRun,
    WorkerHello,
    WorkerLoad,
)
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.sandbox.protocol import Runtime
from prorl_hpc.tasks.protocol import AgentHandler
from prorl_hpc.tasks.registry import BUILT_IN, get_handler
from prorl_hpc.transport.agent_line import AgentLine
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.worker.gateway_runs import Runs
from prorl_hpc.worker.llms import LLMSource
from prorl_hpc.worker.outbox import Outbox
from prorl_hpc.worker.policies import Policy
from prorl_hpc.worker.request_rotation import RequestRotation
from prorl_hpc.worker.stages import StageRunner
from prorl_hpc.worker.web_search import make_web_search

log = logging.getLogger(__name__)

STOP_WITHIN_S = 1.5
"""How long stages and sandboxes have to end in order when the worker ends."""


class Handlers:
    """Handlers by task name, each made once. Only the run's own task may be named by import path: names come
    from clients of the service, and a path imports code."""

    def __init__(self, task: TaskConfig) -> None:
        self._task = task
        self._made: dict[str, AgentHandler] = {task.name: get_handler(task.name, task)}

    def __call__(self, name: str) -> AgentHandler:
        if name not in self._made:
            if name not in BUILT_IN:
                known = ", ".join(sorted({*BUILT_IN, self._task.name}))
                raise ConfigError(f"task {name} is not one that this run serves: {known}")
            # The options belong to the run's own task.
            self._made[name] = get_handler(name, dataclasses.replace(self._task, name=name, options={}))
        return self._made[name]


class Worker:
    """``run`` returns when the worker was told to stop, and raises what ends it otherwise. A Shutdown ends it at once;
    ``stop`` lets it drain first."""

    def __init__(
        self,
        worker_id: str,
        node: str,
        config: ProrlConfig,
        keys: RunKeys,
        runtime: Runtime,
        llms: LLMSource,
        policies: Mapping[str, Policy],
        find_endpoint: Callable[[], str],
        outside: Runs | None = None,
    ) -> None:
        """``runtime`` is prepared; the caller closes it. ``find_endpoint`` gives the coordinator's address. ``outside``: RUN
        is played by a program in the sandbox."""
        self._worker_id = worker_id
        self._node = node
        self._pools = pools_of(config.rollout)
        self._runtime = runtime
        self._drain_s = config.rollout.drain_s
        self._draining = False
        self._outbox = Outbox()
        move = config.rollout.when_server_lost == "move"
        handlers = Handlers(config.task)
        # Only a coordinator of round_robin_per_request names servers to take in turn.
        self._rotation = RequestRotation(llms) if config.rollout.balancing == PER_REQUEST else None
        self._stages = StageRunner(
            worker_id,
            runtime,
            self._rotation or llms,
            policies,
            handlers,
            self._outbox,
            move=move,
            outside=outside,
            web_search=make_web_search(config.task.web_search_url),
        )
        self._line: AgentLine[CoordinatorToWorker] = AgentLine(
            CoordinatorToWorker,
            keys,
            worker_id,
            find_endpoint,
            heartbeat_s=config.rollout.heartbeat_s,
            lost_after_s=config.rollout.lost_after_s,
        )

    async def run(self, stop: asyncio.Event, on_welcome: Callable[[], None] = lambda: None) -> str:
        """Serve until Shutdown or ``stop``; returns the reason. Raises RunError if the coordinator is lost,
        TransportError if it speaks another version."""
        parts = [
            asyncio.create_task(self._obey(), name="orders"),
            asyncio.create_task(self._line.watch(self._hello, self._load), name="heartbeat"),
            asyncio.create_task(self._outbox.deliver(self._line.send_many), name="reports"),
            asyncio.create_task(self._told_to_stop(stop), name="stop"),
        ]
        welcome = asyncio.create_task(self._greet(on_welcome))
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            reason = next((task.result() for task in done if task.exception() is None), None)
            if reason is None:
                raise next(error for task in done if (error := task.exception()) is not None)
            log.info("stopping: %s", reason)
            return str(reason)
        finally:
            for task in (*parts, welcome):
                task.cancel()
            await asyncio.gather(*parts, welcome, return_exceptions=True)
            try:
                await self._free_everything()
            finally:
                self._line.close()

    async def _obey(self) -> str:
        async for order in self._line.messages():
            match order:
                case StartInit():
                    self._stages.start_init(order)
                case StartRun():
                    self._stages.start_run(order)
                case StartEval():
                    self._stages.start_eval(order)
                case MoveRun():
                    self._stages.move_run(order)
                case RequestServers() if self._rotation is not None:
                    self._rotation.told(order)
                case Discard():
                    self._stages.discard(order)
                case Acknowledge():
                    self._outbox.acknowledge(order.rollout_ids)
                case Shutdown():
                    return f"the coordinator ends the run: {order.reason}"
                case _:
                    log.error("the coordinator sent %s, which no worker knows", type(order).__name__)
        raise RunError("the line to the coordinator ended")

    async def _told_to_stop(self, stop: asyncio.Event) -> str:
        """Drain: what runs may end and be acknowledged, for ``rollout.drain_s``."""
        await stop.wait()
        self._draining = True
        self._outbox.say(Draining(self._worker_id))
        try:
            async with asyncio.timeout(self._drain_s):
                while not self._stages.settled:  # noqa: ASYNC110  (changes on every report, order and cancellation)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.info("what runs after %g s of draining is to be done elsewhere", self._drain_s)
        await self._line.send_many([*self._outbox.take(), Goodbye(self._worker_id)])
        return "told to stop"

    async def _greet(self, on_welcome: Callable[[], None]) -> None:
        await self._line.welcomed.wait()
        on_welcome()

    async def _free_everything(self) -> None:
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._stages.close()
        except TimeoutError:
            # Closing the runtime, which follows, ends them by force and raises if it cannot.
            log.warning(
                "%d sandboxes on %s did not stop within %g s", self._stages.sandboxes, self._node, STOP_WITHIN_S
            )

    def _hello(self) -> WorkerHello:
        self._outbox.drop_reports()
        if self._draining:  # a coordinator that was started anew has not heard it
            self._outbox.say(Draining(self._worker_id))
        return WorkerHello(self._worker_id, self._node, self._pools, self._runtime.description, self._stages.held)

    async def _load(self) -> WorkerLoad:
        return WorkerLoad(self._worker_id, self._stages.sandboxes)


def pools_of(rollout: RolloutConfig) -> Pools:
    """The worker's slots, from group ``rollout``."""
    return Pools(
        init=rollout.init_slots,
        ready=rollout.ready_slots,
        run=rollout.run_slots,
        eval=rollout.eval_slots,
        coupled=rollout.coupled,
    )
