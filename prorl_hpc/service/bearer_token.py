"""Bearer-token authentication (RFC 6750) around an ASGI app, for the TCP port."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_hpc.service.calls import json_answer
from prorl_hpc.service.errors import Refusal, answer_of

_OPEN_PATHS = {"/healthz"}
"""Says nothing but that the service is there."""


class BearerToken:
    """Lets in requests with ``Authorization: Bearer <token>``; compares in constant time."""

    def __init__(self, app: ASGIApp, token: str, refused: Callable[[str], None] = lambda code: None) -> None:
        """``refused`` is told the code of each refusal."""
        if not token:
            raise ValueError("an empty token would let everyone in")
        self._refused = refused
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._allowed(Headers(scope=scope)):
            message = "this call needs the header `Authorization: Bearer TOKEN` with the run's token (keys/api-token)"
            refusal = Refusal(message, code="unauthorized", status=401)
            self._refused(refusal.code)
            response = json_answer(answer_of(refusal), 401, {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)
