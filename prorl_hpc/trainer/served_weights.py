"""The weights that the inference servers serve: waiting for servers, and publishing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.inference import WeightProbe
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.trainer.crew import Crew
from prorl_hpc.trainer.deepspeed_settings import choose_dtype
from prorl_hpc.trainer.publish import announce
from prorl_hpc.trainer.publisher import Publisher
from prorl_hpc.trainer.rollout_service import RolloutService
from prorl_hpc.trainer.stopping import StopSignal

log = logging.getLogger(__name__)
HOLDER = "trainer"
"""Whose pause it is: an operator's own, which lasts, is another and stays as it is."""
HOLD_S, HOLD_AGAIN_S = 60.0, 20.0
"""A trainer that dies holds rollouts back for so long at most; one that lives asks again in time."""
RESUME_S = 5.0
"""A service that is ending as well may not answer any more, and the pause is soon over without it."""


class ServedWeights:
    """``version`` is what the servers serve, 0 before the first ``publish``."""

    def __init__(
        self,
        config: ProrlConfig,
        run: RunDirectory,
        service: RolloutService,
        crew: Crew,
        publisher: Publisher,
        stop: StopSignal,
        probe_ids: list[int],
    ) -> None:
        self._config, self._run, self._service = config, run, service
        self._crew, self._publisher, self._stop, self._probe_ids = crew, publisher, stop, probe_ids
        self._servers = frozenset(p.name for p in make_plan(config).processes if p.llm_server)
        self.version = 0

    async def wait_for_servers(self, say: Callable[[str], None]) -> None:
        """Until the service has as many healthy servers as the plan has; after start_timeout_s one will do."""
        wanted, patience_s = len(self._servers), self._config.run.start_timeout_s
        deadline = time.monotonic() + patience_s
        while True:
            status = await self._stop.guard(self._service.status())
            healthy = [s for s in status.servers if s.healthy and s.server_id in self._servers]
            if len(healthy) >= wanted:
                return
            if healthy and time.monotonic() > deadline:
                log.warning("going on with %d of %d inference servers: the others may still come", len(healthy), wanted)
                return
            if time.monotonic() > deadline:
                known = ", ".join(
                    f"{s.server_id} ({s.detail or 'healthy' if s.healthy else 'down'})" for s in status.servers
                )
                raise RunError(
                    f"none of {wanted} inference servers was ready after {patience_s:.0f} s "
                    f"(run.start_timeout_s); known: {known or 'none'}. Their logs are in {self._run.logs}"
                )
            say(f"{len(healthy)} of {wanted} inference servers are ready")
            await self._stop.guard(asyncio.sleep(0.5))

    async def publish(self, version: int) -> float | None:
        """Offer the trainer's weights, have every server load them, check the probe; the largest gap."""
        settings = self._config.trainer
        probe = WeightProbe(self._probe_ids, await self._crew.score(self._probe_ids), probe_tolerance(self._config))
        update = await self._publisher.offer(version, probe)

        async def deliver() -> float | None:
            async with admission_paused(self._service, wanted=settings.pause_admission):
                return await announce(self._service, update, patience_s=self._config.run.start_timeout_s)

        gap = await self._stop.guard(deliver())
        self._publisher.delivered()
        self.version = version
        log.info("weights %d are served, probe gap %s", version, "unknown" if gap is None else f"{gap:.2g}")
        return gap


def probe_tolerance(config: ProrlConfig) -> float:
    """``trainer.probe_tolerance``, or what rounding alone stays below. Measured on one sentence: 3e-5 nats between engine and trainer
    in float32; 0.25 between two ways of computing in bfloat16 (SmolLM2-135M)."""
    given = config.trainer.probe_tolerance
    precise = choose_dtype(config.trainer.dtype) == torch.float32 and (
        config.engine.dtype == "float32" or (config.engine.dtype == "auto" and not torch.cuda.is_available())
    )
    return given or (0.05 if precise else 0.5)


@asynccontextmanager
async def admission_paused(service: RolloutService, *, wanted: bool) -> AsyncIterator[None]:
    """Meanwhile the trainer holds rollouts back, if ``wanted``; afterwards it does not, however this ends."""
    if not wanted:
        yield
        return
    holding: asyncio.Task[None] | None = None
    try:
        await service.pause(HOLDER, HOLD_S)
        holding = asyncio.create_task(_hold_on(service))
        yield
    finally:
        if holding is not None:
            holding.cancel()
        try:
            async with asyncio.timeout(RESUME_S):
                await service.resume(HOLDER)
        except (ServiceError, TimeoutError) as error:
            log.warning("rollouts may be held back for %.0f s more, nobody could be told to go on: %s", HOLD_S, error)


async def _hold_on(service: RolloutService) -> None:
    while True:
        await asyncio.sleep(HOLD_AGAIN_S)
        try:
            await service.pause(HOLDER, HOLD_S)
        except ServiceError as error:
            log.warning("rollouts may start while weights are loaded, they could not be held back longer: %s", error)
