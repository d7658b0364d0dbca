"""OpenAI Responses: POST /v1/responses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from prorl_hpc.gateway.api import Exchange, OpenAiErrors, event
from prorl_hpc.gateway.calls import Answer, AnswerEnd, ModelCall, Refusal, Trouble, invalid
from prorl_hpc.gateway.chat_completions import token_logprobs
from prorl_hpc.gateway.fields import check_conversation, check_tools, limit_of, name_results, read_fields, refuse_others
from prorl_hpc.gateway.response_items import read_items
from prorl_hpc.gateway.response_stream import item_events
from prorl_hpc.gateway.session import Session
from prorl_hpc.messages.trajectory import Message, ToolSchema

_ONLY: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "prompt": (),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_LOGPROBS = "message.output_text.logprobs"


class _Tool(Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Format(Struct):
    type: str = "text"


class _Text(Struct):
    format: _Format | None = None


class _Request(Struct):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | None = None
    text: _Text | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None


class Responses(OpenAiErrors):
    """See gateway.api.ChatApi. The conversations of responses that were not forbidden to be stored are kept for
    ``previous_response_id`` as long as their session is open."""

    def read(self, body: dict[str, Any], session: Session) -> Exchange:
        refuse_others(body, _ONLY, "the policy writes text, and calls tools when it chooses to")
        request = read_fields(body, _Request)
        if request.text is not None and request.text.format is not None and request.text.format.type != "text":
            raise invalid("text.format.type", f"{request.text.format.type!r} is not possible; allowed: text")
        messages = [*_earlier(request, session), *read_items(request.input)]
        check_conversation(messages, "input")
        name_results(messages)
        system = [Message("system", request.instructions)] if request.instructions else []
        call = ModelCall(
            [*system, *messages],
            _read_tools(request.tools or []),
            request.tool_choice != "none",
            limit_of("max_output_tokens", request.max_output_tokens),
        )
        return _Exchange(request, call, messages, session, body)


def _earlier(request: _Request, session: Session) -> list[Message]:
    """The instructions of earlier responses are not kept, as OpenAI has it."""
    previous = request.previous_response_id
    if previous is None:
        return []
    if previous not in session.responses:
        message = f"there is no response {previous[:80]!r} of this rollout: it was not stored, or belongs to another"
        raise Refusal(Trouble.INVALID, message, "previous_response_id")
    return session.responses[previous]


def _read_tools(tools: list[_Tool]) -> list[ToolSchema]:
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type", f"{tool.type!r} is not possible; allowed: function")
    found = [
        ToolSchema(tool.name, tool.description or "", tool.parameters or {"type": "object", "properties": {}})
        for tool in tools
    ]
    check_tools(found)
    return found


class _Exchange:
    def __init__(
        self, request: _Request, call: ModelCall, messages: list[Message], session: Session, body: dict[str, Any]
    ) -> None:
        self.call = call
        self.stream = bool(request.stream)
        self._request = request
        self._messages = messages
        self._session = session
        self._echo = {
            name: body.get(name) for name in ("instructions", "previous_response_id", "metadata", "reasoning")
        }
        self._echo |= {"tools": body.get("tools") or [], "tool_choice": request.tool_choice or "auto"}
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())

    def answer(self, answer: Answer) -> dict[str, Any]:
        if self._request.store is not False:
            self._session.responses[self._id] = [*self._messages, answer.message]
        cut = answer.end is AnswerEnd.LENGTH
        status = "incomplete" if cut else "completed"
        total = answer.prompt_tokens + answer.completion_tokens
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        }
        details = {"reason": "max_output_tokens"} if cut else None
        output = self._items(answer, status)
        return {**self._head(status), "incomplete_details": details, "output": output, "usage": usage}

    def events(self, answer: Answer) -> Iterator[bytes]:
        whole = self.answer(answer)
        started = {**self._head("in_progress"), "incomplete_details": None, "output": [], "usage": None}
        told: list[dict[str, Any]] = [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
        ]
        for index, item in enumerate(whole["output"]):
            told += item_events(item, index)
        told.append({"type": f"response.{whole['status']}", "response": whole})
        for number, data in enumerate(told):
            yield event({**data, "sequence_number": number}, data["type"])

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        error = OpenAiErrors().refuse(refusal)[1]["error"]
        words = {"code": error["code"], "message": error["message"], "param": error["param"]}
        yield event({"type": "error", **words, "error": error, "sequence_number": 0}, "error")

    def _head(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "model": self._request.model,
            "max_output_tokens": self._request.max_output_tokens,
            "parallel_tool_calls": True,
            "store": self._request.store is not False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            **self._echo,
        }

    def _items(self, answer: Answer, status: str) -> list[dict[str, Any]]:
        message, items = answer.message, list[dict[str, Any]]()
        if message.reasoning:
            thought = [{"type": "reasoning_text", "text": message.reasoning}]
            items.append(
                {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": thought, "status": status}
            )
        if message.content or not message.tool_calls:
            wanted = _LOGPROBS in (self._request.include or [])
            logprobs = token_logprobs(answer.turn, self._session.chat) if wanted else []
            text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": logprobs}
            items.append(
                {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": status, "content": [text]}
            )
        for made in message.tool_calls:
            items.append(
                {
                    "type": "function_call",
                    "id": _new_id("fc"),
                    "call_id": made.call_id,
                    "name": made.name,
                    "arguments": json.dumps(made.arguments, ensure_ascii=False),
                    "status": status,
                }
            )
        return items


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
