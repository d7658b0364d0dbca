"""Requests that the model does not answer: which models there are, and how long a prompt is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from prorl_hpc.gateway.anthropic_messages import AnthropicErrors, read_prompt
from prorl_hpc.gateway.api import OpenAiErrors
from prorl_hpc.gateway.asked import FindSession, authorized, broken, read_body, refusal_answer
from prorl_hpc.gateway.calls import Refusal


class CountTokens:
    """POST /v1/messages/count_tokens: of the prompt that would begin a conversation."""

    def __init__(self, find_session: FindSession) -> None:
        self._find_session = find_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            session = authorized(request, self._find_session)
            call = read_prompt(await read_body(request, session))
            answer: Response = JSONResponse({"input_tokens": await session.count_tokens(call)})
        except Refusal as refusal:
            answer = refusal_answer(AnthropicErrors(), refusal)
        except Exception as error:
            answer = refusal_answer(AnthropicErrors(), broken(error))
        await answer(scope, receive, send)


class Models:
    """GET /v1/models, in the words of whoever asks. The rollout's policy answers to every name, so that agents may keep
    theirs; it is listed under its own."""

    def __init__(self, find_session: FindSession) -> None:
        self._find_session = find_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        anthropic = "anthropic-version" in request.headers
        try:
            name = authorized(request, self._find_session).policy
        except Refusal as refusal:
            await refusal_answer(AnthropicErrors() if anthropic else OpenAiErrors(), refusal)(scope, receive, send)
            return
        one = request.path_params.get("model")
        if anthropic:
            created = "1970-01-01T00:00:00Z"
            model = {"type": "model", "id": one or name, "display_name": one or name, "created_at": created}
            whole = {"data": [model], "has_more": False, "first_id": name, "last_id": name}
        else:
            model = {"id": one or name, "object": "model", "created": 0, "owned_by": "prorl_hpc"}
            whole = {"object": "list", "data": [model]}
        await JSONResponse(model if one else whole)(scope, receive, send)
