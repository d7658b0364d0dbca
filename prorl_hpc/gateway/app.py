"""The gateway's HTTP face: who calls, which API, and clients that hang up."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prorl_hpc.gateway.anthropic_messages import AnthropicErrors, AnthropicMessages
from prorl_hpc.gateway.api import ChatApi, Exchange
from prorl_hpc.gateway.asked import FindSession, authorized, broken, read_body, refusal_answer
from prorl_hpc.gateway.calls import Answer, Refusal, Trouble
from prorl_hpc.gateway.chat_completions import ChatCompletions
from prorl_hpc.gateway.questions import CountTokens, Models
from prorl_hpc.gateway.responses import Responses
from prorl_hpc.gateway.session import Session

PING_S = 10.0
"""A stream whose answer is not there yet shows so often that it lives."""


def make_app(find_session: FindSession, ping_s: float = PING_S) -> Starlette:
    """``find_session`` gives the session of a key."""
    openai = ChatCompletions()
    apis: dict[str, ChatApi] = {
        "/v1/chat/completions": openai,
        "/v1/responses": Responses(),
        "/v1/messages": AnthropicMessages(),
    }
    routes = [Route(path, _ChatRoute(api, find_session, ping_s), methods=["POST"]) for path, api in apis.items()]
    routes += [
        Route("/v1/messages/count_tokens", CountTokens(find_session), methods=["POST"]),
        Route("/v1/models", Models(find_session), methods=["GET"]),
        Route("/v1/models/{model:path}", Models(find_session), methods=["GET"]),
    ]

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "what this handler is registered for"
        kind = Trouble.METHOD if error.status_code == 405 else Trouble.NOT_FOUND
        known = ", ".join(route.path for route in routes)
        refusal = Refusal(kind, f"{request.method} {request.url.path} is not served here; there are {known}")
        errors = AnthropicErrors() if request.url.path.startswith("/v1/messages") else openai
        return refusal_answer(errors, refusal)

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
            exchange = self._api.read(await read_body(request, session), session)
            task = await session.start(exchange.call)
        except Refusal as refusal:
            await refusal_answer(self._api, refusal)(scope, receive, send)
            return
        except Exception as error:
            await refusal_answer(self._api, broken(error))(scope, receive, send)
            return
        await self._answer(exchange, session, task, _Client(scope, receive, send))

    async def _answer(self, exchange: Exchange, session: Session, task: asyncio.Task[Answer], client: _Client) -> None:
        delivered = False
        try:
            if exchange.stream:
                delivered = await self._stream(exchange, task, client)
            else:
                await asyncio.wait({task, client.gone}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    delivered = await self._whole(exchange, task, client)
        finally:
            client.gone.cancel()
            task.cancel()
            if not delivered and task.done() and not task.cancelled() and task.exception() is None:
                session.not_delivered(exchange.call, task.result())

    async def _whole(self, exchange: Exchange, task: asyncio.Task[Answer], client: _Client) -> bool:
        """Whether the answer was sent."""
        delivered = False
        try:
            response: Response = JSONResponse(exchange.answer(_answer_of(task)))
            delivered = not client.gone.done()
        except Refusal as refusal:
            response = refusal_answer(self._api, refusal)
        except Exception as error:
            response = refusal_answer(self._api, broken(error))
        await client.respond(response)
        return delivered

    async def _stream(self, exchange: Exchange, task: asyncio.Task[Answer], client: _Client) -> bool:
        """Whether the answer was sent."""
        send, gone = client.send, client.gone
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not task.done():
            await asyncio.wait({task, gone}, timeout=self._ping_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return False
            if not task.done():
                await send({"type": "http.response.body", "body": b": working\n\n", "more_body": True})
        delivered = False
        try:
            events = list(exchange.events(_answer_of(task)))
            delivered = not gone.done()
        except Refusal as refusal:
            events = list(exchange.failed(refusal))
        except Exception as error:
            events = list(exchange.failed(broken(error)))
        for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return delivered


class _Client:
    """Who waits for an answer. ``gone`` is done when it has hung up."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self.send = send
        self.gone = asyncio.create_task(_hung_up(receive))

    async def respond(self, response: Response) -> None:
        await response(self._scope, self._receive, self.send)


def _answer_of(task: asyncio.Task[Answer]) -> Answer:
    """Of a task that is done; raises Refusal."""
    if task.cancelled():
        raise Refusal(Trouble.OVER, "this rollout has ended")
    error = task.exception()
    if error is not None and not isinstance(error, Refusal):
        raise error
    return task.result()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
