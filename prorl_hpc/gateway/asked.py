"""What all requests have in common: whose they are, what they say, how they are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from prorl_hpc.agents.tool_formats.reading import carriable_problem
from prorl_hpc.gateway.api import Errors
from prorl_hpc.gateway.calls import Refusal, Trouble, invalid
from prorl_hpc.gateway.session import Session

_BODY_S = 60.0
"""How long the body of a request may take to arrive."""

log = logging.getLogger(__name__)
FindSession = Callable[[str], Session | None]


def refusal_answer(errors: Errors, refusal: Refusal) -> Response:
    """Never to be tried again: the SDKs heed this header, and would otherwise repeat a 500."""
    status, body = errors.refuse(refusal)
    return JSONResponse(body, status, headers={"x-should-retry": "false"})


def authorized(request: Request, find_session: FindSession) -> Session:
    """The session of the request's key; Refusal if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    keys = [request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
    session = next((found for key in keys if key and (found := find_session(key)) is not None), None)
    if session is None:
        what = "is not one of a rollout that runs here" if any(keys) else "is missing"
        raise Refusal(
            Trouble.UNAUTHORIZED,
            f"the API key {what}: send the rollout's own (OPENAI_API_KEY or ANTHROPIC_API_KEY of its sandbox) as bearer "
            "token or x-api-key",
        )
    return session


def broken(error: Exception) -> Refusal:
    """A fault of ours."""
    log.error("a request broke the gateway", exc_info=error)
    return Refusal(Trouble.BROKEN, f"the gateway broke: {type(error).__name__}: {error}")


async def read_body(request: Request, session: Session) -> dict[str, Any]:
    """The JSON object that was sent; Refusal if it is none, too large, or holds what no message carries."""
    body, most = bytearray(), session.limits.max_body_bytes
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise Refusal(
                        Trouble.TOO_LARGE,
                        f"the request has more than {most} bytes, which is far too long for the model's context: shorten "
                        "the conversation",
                    )
    except TimeoutError:
        raise Refusal(Trouble.INVALID, f"the request's body did not arrive within {_BODY_S:g} s") from None
    except ClientDisconnect:
        raise Refusal(Trouble.INVALID, "the request's body ended too early") from None
    try:
        value = msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal(Trouble.INVALID, f"the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(Trouble.INVALID, f"the request is a JSON {type(value).__name__}; an object is expected")
    for field, given in _parts(value):
        if problem := carriable_problem(given):
            raise invalid(field, f"it {problem}")
    return value


def _parts(body: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """With their names; of lists each element by itself."""
    for name, value in body.items():
        if isinstance(value, list):
            yield from ((f"{name}[{i}]", element) for i, element in enumerate(value))
        else:
            yield name, value
