"""The client that trainers use. Needs aiohttp and msgspec, nothing of the service itself.

    async with RolloutClient("http://node:port", token) as client:   # or RolloutClient("/path/of/the.socket")
        await client.submit_batch(spec)
        result = await client.wait_batch(spec.batch_id)

All calls can be made again without harm, because their ids are the client's; so a lost connection is
tried again for a while before it is an error.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import RolloutProgress, RolloutResult, RolloutSpec
from prorl_hpc.messages.status import Phase, ProcessState, RunStatus
from prorl_hpc.observe.process import Process
from prorl_hpc.service.errors import ErrorAnswer, Refusal
from prorl_hpc.transport.keys import RunKeys

T = TypeVar("T")

_WAIT_S = 20.0
_ANSWER_S = 60.0
_WEIGHTS_S = 960.0
"""A little more than the service waits for its servers."""


class RolloutClient:
    """Raises ServiceError: with the service's own code and status when it refused, with code ``unreachable`` when it
    could not be reached for ``patience_s`` seconds."""

    def __init__(self, where: str, token: str = "", *, patience_s: float = 30.0) -> None:
        """``where``: ``http://host:port``, or the path of a Unix socket (which needs no token)."""
        self._socket_path = "" if "://" in where else where
        self._base = where.rstrip("/") if "://" in where else "http://localhost"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def for_run(cls, process: Process, *, patience_s: float = 30.0) -> RolloutClient:
        """The service of the process's own run, once its coordinator is READY (``Process.wait_for``)."""
        state = read_json(process.run.process_state("coordinator"), ProcessState)
        if state is None or state.phase is not Phase.READY:
            phase = "has not started" if state is None else f"is {state.phase}"
            message = f"the coordinator of {process.run.run_id} {phase}: wait until it is ready"
            raise ServiceError(message, code="unreachable", status=503)
        if state.node == process.node:
            return cls(state.endpoints["uds"], patience_s=patience_s)
        if "http" not in state.endpoints:
            message = (
                f"the service on {state.node} has no TCP port, and this is {process.node}: set rollout.http_tcp=true"
            )
            raise ServiceError(message, code="unreachable", status=503)
        return cls(state.endpoints["http"], RunKeys.load(process.run.keys).api_token, patience_s=patience_s)

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # batches

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        return await self._call("POST", "/v1/batches", BatchProgress, body=spec)

    async def batch_progress(self, batch_id: str) -> BatchProgress:
        return await self._call("GET", f"/v1/batches/{batch_id}", BatchProgress)

    async def wait_batch(self, batch_id: str) -> BatchResult:
        """However long it takes."""
        return await self._wait(f"/v1/batches/{batch_id}/result", BatchResult)

    async def cancel_batch(self, batch_id: str) -> BatchProgress:
        """409 ``already_finished`` if it has ended otherwise."""
        return await self._call("DELETE", f"/v1/batches/{batch_id}", BatchProgress)

    # single rollouts

    async def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        return await self._call("POST", "/v1/rollouts", list[RolloutProgress], body=specs)

    async def get_rollout(self, rollout_id: str) -> RolloutProgress:
        return await self._call("GET", f"/v1/rollouts/{rollout_id}", RolloutProgress)

    async def wait_rollout(self, rollout_id: str) -> RolloutResult:
        """However long it takes."""
        return await self._wait(f"/v1/rollouts/{rollout_id}/result", RolloutResult)

    async def cancel_rollout(self, rollout_id: str) -> RolloutProgress:
        """409 ``already_finished`` if it has ended otherwise."""
        return await self._call("DELETE", f"/v1/rollouts/{rollout_id}", RolloutProgress)

    # the run

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        """One answer per LLM server; look at each one's ``error``."""
        return await self._call("POST", "/v1/weights", list[WeightUpdated], body=update, answer_s=_WEIGHTS_S)

    async def status(self) -> RunStatus:
        return await self._call("GET", "/v1/status", RunStatus)

    # machinery

    async def _wait(self, path: str, type_: type[T]) -> T:
        while True:
            status, body = await self._request("GET", f"{path}?wait_s={_WAIT_S:g}", None, _WAIT_S + _ANSWER_S)
            if status != 202:
                return self._decode(body, type_)

    async def _call(
        self, method: str, path: str, type_: type[T], *, body: Any = None, answer_s: float = _ANSWER_S
    ) -> T:
        payload = None if body is None else msgspec.json.encode(body)
        _, answer = await self._request(method, path, payload, answer_s)
        return self._decode(answer, type_)

    async def _request(self, method: str, path: str, body: bytes | None, answer_s: float) -> tuple[int, bytes]:
        """Status and body of an answer that is no refusal."""
        lost: float | None = None
        pause_s = 0.1
        while True:
            try:
                return await self._request_once(method, path, body, answer_s)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                lost = lost or time.monotonic()
                if time.monotonic() + pause_s > lost + self._patience_s:
                    where = self._socket_path or self._base
                    message = f"the rollout service at {where} cannot be reached: {error or type(error).__name__}"
                    raise ServiceError(message, code="unreachable", status=503) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    async def _request_once(self, method: str, path: str, body: bytes | None, answer_s: float) -> tuple[int, bytes]:
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=answer_s)
        async with self._open_session().request(
            method, self._base + path, data=body, headers=headers, timeout=timeout
        ) as response:
            answer = await response.read()
            if response.status >= 400:
                raise _refusal(response.status, answer)
            return response.status, answer

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            unix = aiohttp.UnixConnector(self._socket_path) if self._socket_path else None
            # trust_env stays off: a site's HTTP proxy must not carry traffic between our nodes.
            self._session = aiohttp.ClientSession(connector=unix)
        return self._session

    def _decode(self, body: bytes, type_: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.DecodeError as error:
            message = f"the service answered what this version of the client does not understand: {error}"
            raise ServiceError(message, code="bad_answer", status=502) from error


def _refusal(status: int, body: bytes) -> Refusal:
    try:
        error = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.DecodeError:
        text = body[:500].decode(errors="replace")
        return Refusal(f"HTTP {status}: {text}", code="http_error", status=status)
    return Refusal(error.message, code=error.code, status=status, details=error.details)
