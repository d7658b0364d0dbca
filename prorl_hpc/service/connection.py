"""The client's way to the service: one HTTP session, tried again while the service is away or asks for patience."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.service.errors import ErrorAnswer, Refusal

T = TypeVar("T")
LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""What aiohttp raises when the service, or the way to it, is gone."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True)
class Where:
    """``http://host:port``, or the path of a Unix socket (which needs no token)."""

    address: str
    token: str = ""

    @property
    def socket_path(self) -> str:
        return "" if "://" in self.address else self.address

    @property
    def base(self) -> str:
        return self.address.rstrip("/") if "://" in self.address else "http://localhost"


class AskedForPatience(Exception):
    """429, or 503 with Retry-After. ``pause_s``: the least before the next call."""

    def __init__(self, refusal: ServiceError, pause_s: float) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.pause_s = pause_s


class Patience:
    """Bears ``patience_s`` seconds without any good answer."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._pause_s = _FIRST_PAUSE_S
        self._lost: float | None = None

    def restored(self) -> None:
        self._lost, self._pause_s = None, _FIRST_PAUSE_S

    async def bear(self, error: BaseException, where: Where) -> None:
        """Pause; raises ServiceError when it has lasted too long."""
        now = time.monotonic()
        self._lost = now if self._lost is None else self._lost
        asked = error.pause_s if isinstance(error, AskedForPatience) else 0.0
        pause_s = max(asked, self._pause_s)
        if now + pause_s > self._lost + self._patience_s:
            if isinstance(error, AskedForPatience):
                raise error.refusal from None
            message = f"the rollout service at {where.address} cannot be reached: {error or type(error).__name__}"
            raise ServiceError(message, code="unreachable", status=503) from error
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)


class Connection:
    def __init__(self, where: Where, patience_s: float, locate: Callable[[], Where | None] | None = None) -> None:
        """``locate`` says where the service is now, when it was lost; None while that is not known."""
        self._where = where
        self._patience_s = patience_s
        self._locate = locate
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, method: str, path: str, body: bytes | None, answer_s: float) -> tuple[int, bytes]:
        """Status and body of an answer that is no refusal."""

        async def once() -> tuple[int, bytes]:
            async with self._request(method, path, body, answer_s) as response:
                answer = await response.read()
                check(response, answer)
                return response.status, answer

        return await self.persist(once, Patience(self._patience_s))

    async def lines(self, path: str, silence_s: float) -> AsyncGenerator[bytes, None]:
        """The lines of one answer, blank ones too. Raises LOST, AskedForPatience, ServiceError."""
        async with self._request("GET", path, None, silence_s) as response:
            if response.status >= 400:
                check(response, await response.read())
            rest = bytearray()
            async for chunk in response.content.iter_any():
                *whole, last = chunk.split(b"\n")
                for line in whole:
                    yield bytes(rest + line)
                    rest.clear()
                rest += last

    def patience(self) -> Patience:
        return Patience(self._patience_s)

    async def lost(self, error: BaseException, patience: Patience) -> None:
        """Wait a little and look where the service is now. Raises ServiceError when patience is at its end."""
        await patience.bear(error, self._where)
        if isinstance(error, AskedForPatience) or self._locate is None:
            return
        found = await asyncio.to_thread(self._locate)
        if found is not None and found != self._where:
            await self.close()
            self._where = found

    async def persist(self, once: Callable[[], Awaitable[T]], patience: Patience) -> T:
        while True:
            try:
                return await once()
            except (*LOST, AskedForPatience) as error:
                await self.lost(error, patience)

    def _request(self, method: str, path: str, body: bytes | None, answer_s: float) -> Any:
        headers = {"Authorization": f"Bearer {self._where.token}"} if self._where.token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._session is None:
            unix = aiohttp.UnixConnector(self._where.socket_path) if self._where.socket_path else None
            # trust_env stays off: a site's HTTP proxy must not carry traffic between our nodes.
            self._session = aiohttp.ClientSession(connector=unix)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=answer_s)
        url = URL(self._where.base + path, encoded=True)
        return self._session.request(method, url, data=body, headers=headers, timeout=timeout)


def check(response: aiohttp.ClientResponse, body: bytes) -> None:
    """Raises Refusal, or AskedForPatience, unless it is a good answer."""
    status = response.status
    if status < 400:
        return
    refusal = refusal_of(status, body)
    pause = response.headers.get("Retry-After", "")
    if status in (429, 503) and pause.isdecimal():
        # 503: nobody has joined yet, which may change at any moment; the client's own pauses grow to as much.
        raise AskedForPatience(refusal, float(pause) if status == 429 else 0.0)
    raise refusal


def refusal_of(status: int, body: bytes) -> Refusal:
    try:
        error = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.DecodeError:
        text = body[:500].decode(errors="replace")
        return Refusal(f"HTTP {status}: {text}", code="http_error", status=status)
    return Refusal(error.message, code=error.code, status=status, details=error.details)
