"""The gateway's HTTP face: who calls, which API, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prorl_hpc.gateway.api import ChatApi, Errors, Exchange
from prorl_hpc.gateway.calls import Answer, Refusal, Trouble
from prorl_hpc.gateway.chat_completions import ChatCompletions
from prorl_hpc.gateway.session import Session

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
PING_S = 10.0
"""A stream whose answer is not there yet shows so often that it lives."""

FindSession = Callable[[str], Session | None]


def make_app(find_session: FindSession, ping_s: float = PING_S) -> Starlette:
    """``find_session`` gives the session of a key."""
    openai = ChatCompletions()
    apis: dict[str, ChatApi] = {"/v1/chat/completions": openai}
    routes = [Route(path, _ChatRoute(api, find_session, ping_s), methods=["POST"]) for path, api in apis.items()]

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "what this handler is registered for"
        kind = Trouble.METHOD if error.status_code == 405 else Trouble.NOT_FOUND
        known = ", ".join(route.path for route in routes)
        refusal = Refusal(kind, f"{request.method} {request.url.path} is not served here; there are {known}")
        return refusal_answer(apis.get(request.url.path, openai), refusal)

    return Starlette(routes=routes, exception_handlers={404: refuse, 405: refuse})


class _ChatRoute:
    """POST of one API: read, generate, answer; a client that hangs up cancels its generation."""

    def __init__(self, api: ChatApi, find_session: FindSession, ping_s: float) -> None:
        self._api = api
        self._find_session = find_session
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            session = authorized(request, self._find_session)
            exchange = self._api.read(await read_body(request), session)
            task = session.start(exchange.call)
        except Refusal as refusal:
            await refusal_answer(self._api, refusal)(scope, receive, send)
            return
        gone = asyncio.create_task(_hung_up(receive))
        try:
            if exchange.stream:
                await self._stream(exchange, task, gone, send)
            else:
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    await self._whole(exchange, task)(scope, receive, send)
        finally:
            gone.cancel()
            task.cancel()

    def _whole(self, exchange: Exchange, task: asyncio.Task[Answer]) -> Response:
        try:
            return JSONResponse(exchange.answer(_answer_of(task)))
        except Refusal as refusal:
            return refusal_answer(self._api, refusal)

    async def _stream(
        self, exchange: Exchange, task: asyncio.Task[Answer], gone: asyncio.Task[None], send: Send
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not task.done():
            await asyncio.wait({task, gone}, timeout=self._ping_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            if not task.done():
                await send({"type": "http.response.body", "body": b": working\n\n", "more_body": True})
        try:
            events = list(exchange.events(_answer_of(task)))
        except Refusal as refusal:
            events = list(exchange.failed(refusal))
        for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _answer_of(task: asyncio.Task[Answer]) -> Answer:
    """Of a task that is done; raises Refusal."""
    if task.cancelled():
        raise Refusal(Trouble.OVER, "this rollout has ended")
    error = task.exception()
    if error is not None and not isinstance(error, Refusal):
        log.error("a call to the model broke", exc_info=error)
        raise Refusal(Trouble.BROKEN, f"the gateway broke: {error}")
    return task.result()


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
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(Trouble.INVALID, f"the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(Trouble.INVALID, f"the request is a JSON {type(value).__name__}; an object is expected")
    return value


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
