"""What one call of the HTTP API is: how it is reached, what goes in and out, how it may be refused.

The app's routes and the OpenAPI document are both made from a list of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from prorl_hpc.service.decoding import decode_body
from prorl_hpc.service.errors import Refusal
from prorl_hpc.service.parameters import Parameter, Query

JSON = "application/json"
NDJSON = "application/x-ndjson"
PROMETHEUS = "text/plain"

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class Asked:
    """One request, read. ``id`` is that of the path; ``body`` is of the call's ``body`` type."""

    id: str
    query: Query
    body: Any


@dataclass(frozen=True)
class Call:
    """``run`` returns a value of the type ``answer`` (200), of ``pending`` (202), or a ready Response."""

    method: str
    path: str
    summary: str
    run: Callable[[Asked], Awaitable[Any]]
    answer: Any
    body: Any = None
    pending: Any = None
    params: tuple[Parameter[Any], ...] = ()
    refusals: tuple[int, ...] = ()
    media_type: str = JSON
    open: bool = False
    """Answered without the token."""


@dataclass(frozen=True)
class Bodies:
    """Reads bodies as JSON, whatever their Content-Type says; never holds more than ``max_bytes``."""

    max_bytes: int
    stall_s: float
    """A body that stops arriving for so long is refused."""

    async def read(self, request: Request, type_: Any) -> Any:
        """Raises Refusal 400, 408, 413."""
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise self._too_large()
        body = bytearray()
        chunks = request.stream()
        while True:
            try:
                async with asyncio.timeout(self.stall_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                message = f"nothing more of the body came for {self.stall_s:g} s, after {len(body)} bytes"
                raise Refusal(message, code="body_timeout", status=408) from None
            except ClientDisconnect:
                # Nobody reads this; it is counted, and no fault of the service.
                message = f"the client went away after {len(body)} bytes of the body"
                raise Refusal(message, code="client_gone", status=400) from None
            if chunk is None:
                return decode_body(bytes(body), type_)
            body += chunk
            if len(body) > self.max_bytes:
                raise self._too_large()

    def _too_large(self) -> Refusal:
        message = f"the body is larger than {self.max_bytes} bytes: send fewer rows at a time"
        return Refusal(message, code="body_too_large", status=413)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, media_type=JSON)
