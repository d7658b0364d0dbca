"""The GPU node's agent: owns one engine, serves workers at its door, and obeys the coordinator about weights."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from prorl_hpc.config.policies import models_of
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.inference.protocol import Engine, EngineLoad
from prorl_hpc.inference.request_records import RequestRecords
from prorl_hpc.inference.request_server import RequestServer
from prorl_hpc.inference.self_test import SelfTest
from prorl_hpc.messages.control import (
    CoordinatorToInference,
    Goodbye,
    InferenceHello,
    ServerLoad,
    ServerRef,
    Shutdown,
)
from prorl_hpc.messages.errors import InferenceError, RunError
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate, WeightUpdated, WorkerToInference
from prorl_hpc.transport.agent_line import AgentLine
from prorl_hpc.transport.channels import RouterDoor

log = logging.getLogger(__name__)


async def probe_gap(engine: Engine, probe: WeightProbe) -> float:
    """Largest |engine − trainer| logprob difference, nats. InferenceError if it is beyond the tolerance, which
    means that the engine serves other weights than the trainer has."""
    scores = await engine.score(probe.token_ids)
    if len(scores) != len(probe.logprobs):
        raise InferenceError(f"the weight probe has {len(probe.logprobs)} logprobs, the engine gives {len(scores)}")
    gaps = [abs(ours - theirs) for ours, theirs in zip(scores, probe.logprobs, strict=True)]
    worst = max(gaps, default=0.0)
    if not all(gap <= probe.tolerance for gap in gaps):  # so written that NaN is refused too
        raise InferenceError(
            f"after the weight update the engine's logprobs differ from the trainer's by up to {worst:.4g} nats, "
            f"allowed is trainer.probe_tolerance={probe.tolerance:g}: the engine does not serve the trainer's weights"
        )
    return worst


class InferenceAgent:
    """``engine`` is started; whoever made it stops it. ``run`` returns when the agent was told to stop, and
    raises what ends it otherwise. The version that it reports is the newest one that was proved: a coordinator that
    was started anew asks again for one whose answer it has not got."""

    def __init__(
        self,
        server: ServerRef,
        config: ProrlConfig,
        engine: Engine,
        door: RouterDoor[WorkerToInference],
        line: AgentLine[CoordinatorToInference],
        records: RequestRecords | None = None,
    ) -> None:
        self._server = server
        self._config = config
        self._engine = engine
        self._line = line
        self._instance = secrets.token_hex(8)
        self._self_test = SelfTest(server.server_id, engine)
        self._requests = RequestServer(
            server.server_id,
            engine,
            door,
            config.engine.max_parallel_requests,
            config.rollout.lost_after_s,
            self._instance,
            self._self_test.refused,
            records,
        )
        self._updates: asyncio.Queue[WeightUpdate] = asyncio.Queue()
        self._proved: WeightUpdate | None = None
        self._proved_gap: float | None = None
        self._announced_version = 0
        self._weights_trouble = ""
        self._last_load = EngineLoad(0, 0, 0, 0)

    async def run(self, stop: asyncio.Event, on_welcome: Callable[[], None] = lambda: None) -> str:
        """Serve until Shutdown or ``stop``; returns the reason. RunError if the engine is down for good or the
        coordinator is lost, TransportError if it speaks another version."""
        work: list[Coroutine[Any, Any, str | None]] = [
            self._obey(),
            self._line.watch(self._hello, self._heartbeat),
            self._requests.serve(),
            self._apply_updates(),
            self._watch_engine(),
            self._told_to_stop(stop),
        ]
        parts = [asyncio.create_task(part) for part in work]
        welcome = asyncio.create_task(self._greet(on_welcome))
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            reasons = [task.result() for task in done]  # raises what ended a part
            log.info("stopping: %s", reasons[0])
            return str(reasons[0])
        finally:
            for task in (*parts, welcome):
                task.cancel()
            await asyncio.gather(*parts, welcome, return_exceptions=True)

    async def _obey(self) -> str:
        async for order in self._line.messages():
            match order:
                case WeightUpdate():
                    self._updates.put_nowait(order)
                case Shutdown(reason=reason):
                    return f"the coordinator ends the run: {reason}"
                case _:
                    log.error("the coordinator sent %s, which no inference agent knows", type(order).__name__)
        raise RunError("the line to the coordinator ended")

    async def _told_to_stop(self, stop: asyncio.Event) -> str:
        await stop.wait()
        await self._line.send(Goodbye(self._server.server_id))
        return "told to stop"

    async def _greet(self, on_welcome: Callable[[], None]) -> None:
        await self._line.welcomed.wait()
        on_welcome()

    async def _watch_engine(self) -> str:
        words = await self._engine.wait_broken()
        raise RunError(f"the engine of {self._server.server_id} is down for good: {words}")

    async def _apply_updates(self) -> None:
        """One after the other, in the order they came; each is answered, one that was proved before at once."""
        while True:
            update = await self._updates.get()
            began = time.monotonic()
            error = ""
            try:
                if update != self._proved or self._version() != update.version:
                    await self._apply(update)
            except InferenceError as trouble:
                error = str(trouble)
                log.error("weights %d: %s", update.version, error)
            seconds = time.monotonic() - began
            self._weights_trouble = error
            self._announced_version = self._version()
            gap = None if error else self._proved_gap
            if not error:
                log.info("serving weights %d after %.2f s, probe gap %s", update.version, seconds, gap)
            await self._line.send(WeightUpdated(update.version, self._server.server_id, seconds, gap, error))

    async def _apply(self, update: WeightUpdate) -> None:
        await self._engine.update_weights(update)
        self._proved_gap = await probe_gap(self._engine, update.probe) if update.probe is not None else None
        self._proved = update

    def _version(self) -> int:
        """The engine's weights, unless they were not proved: then the last ones that were."""
        return min(self._engine.weight_version, self._proved.version if self._proved is not None else 0)

    def _hello(self) -> InferenceHello:
        self._announced_version = self._version()
        model = models_of(self._config)[self._server.policy]
        return InferenceHello(
            self._server,
            self._engine.description,
            model.name or self._server.policy,
            self._announced_version,
            model.max_context_tokens,
            self._instance,
            self._engine.model.fingerprint,
        )

    async def _heartbeat(self) -> ServerLoad | InferenceHello:
        """The engine's load; or Hello once more, when it was started anew and has lost its weights."""
        trouble = self._weights_trouble
        try:
            # An engine may be too busy to answer at once; that must not look like a lost node.
            async with asyncio.timeout(self._config.rollout.lost_after_s / 4):
                self._last_load = await self._engine.load()
                trouble = trouble or await self._self_test.trouble()
        except TimeoutError:
            log.debug("the engine is too busy to say how busy it is")
            trouble = trouble or self._self_test.words
        except InferenceError as error:
            trouble = str(error)
        if not trouble and self._version() < self._announced_version:
            return self._hello()
        load = self._last_load
        return ServerLoad(
            self._server.server_id,
            self._version(),
            load.running,
            load.waiting + self._requests.waiting,
            load.prompt_tokens,
            load.generated_tokens,
            healthy=not trouble,
            detail=trouble,
        )
