"""The calls of ProRL Agent's server (arXiv 2603.18815), so that a client written for it works unchanged.

A job is a rollout of ours. It lives in the service, not in the request: a client that goes away and asks again
with the same ``job_id`` gets its result. No process is ever killed; what is cancelled is named by its id.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.messages.rollout import RolloutResult
from prorl_hpc.service.calls import Asked, Call
from prorl_hpc.service.errors import Refusal
from prorl_hpc.service.prorl_request import (
    AddressBody,
    CancelBody,
    ProcessBody,
    is_job,
    rollout_id_of,
    rollout_of,
    server_of,
    was_added_here,
)
from prorl_hpc.service.prorl_result import ProrlResult, prorl_result
from prorl_hpc.service.protocol import RolloutService

log = logging.getLogger(__name__)
_LOOK_S = 60.0
_PAGE = 1000


class Said(msgspec.Struct, frozen=True):
    status: str


class Jobs(msgspec.Struct, frozen=True):
    """``llm_servers``: addresses that /add_llm_server registered."""

    status: str
    pending_jobs: int
    llm_servers: list[str]


class ProrlAgentFace:
    """Its registered servers are the lasting sign that it was started: /stop takes them off and buffers them."""

    def __init__(self, service: RolloutService, timeout_s: float, own_task: str) -> None:
        self._own_task = own_task
        self._service = service
        self._limit_s = 2 * timeout_s + 10
        self._started = False
        self._looked_back = False
        self._buffered: dict[str, OutsideServer] = {}
        self._jobs: dict[str, asyncio.Task[RolloutResult]] = {}
        self._control = asyncio.Lock()

    def calls(self) -> list[Call]:
        return [
            Call("POST", "/start", "Take jobs", self._start, Said, refusals=(409, 422, 503)),
            Call("POST", "/stop", "Cancel all jobs, take no more", self._stop, Said, refusals=(503,)),
            Call("POST", "/add_llm_server", "Register an LLM server", self._add, Said, AddressBody, refusals=(409, 422, 503)),
            Call("POST", "/clear_llm_server", "Remove the LLM servers so registered", self._clear, Said, refusals=(503,)),
            Call(
                "POST", "/process", "Do a job and wait for its end", self._process, ProrlResult, ProcessBody,
                refusals=(409, 410, 429, 503, 504),
            ),
            Call("POST", "/cancel", "Cancel a job", self._cancel, Said, CancelBody, refusals=(503,)),
            Call("GET", "/status", "Jobs under way", self._status, Jobs, refusals=(503,)),
        ]  # fmt: skip

    # control

    async def _start(self, asked: Asked) -> Said:
        async with self._control:
            await self._look_back()
            if self._started:
                raise Refusal("already started", code="already_started", status=400)
            for server in self._buffered.values():
                # The first that will not do ends the start: a job must not find that out.
                await self._service.add_server(server)
            self._buffered.clear()
            self._started = True
        return Said("started")

    async def _stop(self, asked: Asked) -> Said:
        async with self._control:
            await self._look_back()
            self._check_started()
            self._started = False
            for job in tuple(self._jobs):
                await self._end(job)
            for server in self._added():
                self._buffered[server.server_id] = server
                await self._remove(server)
        return Said("stopped")

    async def _add(self, asked: Asked) -> Said:
        body: AddressBody = asked.body
        server = server_of(body.address)
        async with self._control:
            await self._look_back()
            if not self._started:
                self._buffered[server.server_id] = server
                return Said(f"{server.url} will be added at /start")
            await self._service.add_server(server)
        return Said(f"{server.url} is added")

    async def _clear(self, asked: Asked) -> Said:
        async with self._control:
            await self._look_back()
            self._buffered.clear()
            for server in self._added():
                await self._remove(server)
        return Said("cleared")

    async def _status(self, asked: Asked) -> Jobs:
        async with self._control:
            await self._look_back()
        self._check_started()
        return Jobs("running", len(self._jobs), [server.url for server in self._added()])

    # jobs

    async def _process(self, asked: Asked) -> ProrlResult:
        body: ProcessBody = asked.body
        async with self._control:
            await self._look_back()
        self._check_started()
        spec = rollout_of(body, self._service.tasks, self._own_task)
        if not any(server.policy == spec.policy for server in self._service.status().servers):
            raise Refusal("there is no LLM server: call /add_llm_server", code="no_servers", status=503)
        await self._service.submit_rollouts([spec])
        if not self._started:  # /stop came in between
            await self._end(spec.rollout_id)
            self._check_started()
        job = self._jobs.get(spec.rollout_id) or self._follow(spec.rollout_id)
        return prorl_result(await asyncio.shield(job), body.instance)

    async def _cancel(self, asked: Asked) -> Said:
        body: CancelBody = asked.body
        return Said(await self._end(rollout_id_of(body.job_id)))

    def _follow(self, rollout_id: str) -> asyncio.Task[RolloutResult]:
        job = asyncio.create_task(self._until_over(rollout_id), name=f"job {rollout_id}")
        self._jobs[rollout_id] = job
        job.add_done_callback(lambda done: self._over(rollout_id, done))
        return job

    def _over(self, rollout_id: str, job: asyncio.Task[RolloutResult]) -> None:
        del self._jobs[rollout_id]
        if not job.cancelled() and job.exception() is not None:
            log.warning("job %s has no result: %s", rollout_id, job.exception())

    async def _until_over(self, rollout_id: str) -> RolloutResult:
        """Raises Refusal 504 at the time limit, which counts queues too, and then ends the job."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._limit_s
        while (left_s := deadline - clock()) > 0:
            answer = await self._service.wait_rollout(rollout_id, min(left_s, _LOOK_S))
            if isinstance(answer, RolloutResult):
                return answer
        await self._end(rollout_id)
        message = f"the job took longer than {self._limit_s:g} s, queues included, and is cancelled"
        raise Refusal(message, code="time_limit", status=504)

    async def _end(self, rollout_id: str) -> str:
        """Cancel; says what came of it."""
        try:
            await self._service.cancel_rollout(rollout_id)
        except ServiceError as error:
            if error.status == 404:
                return "there is no such job"
            if error.status == 409:
                return "the job is already finished"
            raise
        return "cancelled"

    # what stands

    def _check_started(self) -> None:
        if not self._started:
            raise Refusal("not started: call /start", code="not_started", status=503)

    def _added(self) -> list[OutsideServer]:
        servers = self._service.status().servers
        return [server_of(server.url) for server in servers if was_added_here(server.server_id, server.url)]

    async def _remove(self, server: OutsideServer) -> None:
        try:
            await self._service.remove_server(server.server_id)
        except ServiceError as error:
            if error.status != 404:  # gone by itself
                raise

    async def _look_back(self) -> None:
        """Once: a service that was started anew goes on with the jobs that it had."""
        if self._looked_back:
            return
        after, under_way = "", True
        while under_way:
            page = await self._service.list_rollouts(None, "", "", after, _PAGE)
            running = [progress.rollout_id for progress in page if not progress.status.terminal]
            for rollout_id in filter(is_job, running):
                self._jobs.get(rollout_id) or self._follow(rollout_id)
            under_way = len(running) == _PAGE
            after = running[-1] if running else ""
        self._started = bool(self._jobs or self._added())
        self._looked_back = True
