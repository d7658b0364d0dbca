"""What all requests have in common: whose they are, what they say, how they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from prorl_hpc.gateway.api import Errors
from prorl_hpc.gateway.calls import Refusal, Trouble
from prorl_hpc.gateway.session import Session

MAX_BODY_BYTES = 32 * 2**20

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


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object that was sent; Refusal if it is none or too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refusal(Trouble.TOO_LARGE, f"the request has more than {MAX_BODY_BYTES // 2**20} MiB")
    try:
        value = msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal(Trouble.INVALID, f"the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(Trouble.INVALID, f"the request is a JSON {type(value).__name__}; an object is expected")
    return value
