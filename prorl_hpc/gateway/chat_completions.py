"""OpenAI Chat Completions: POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.gateway.api import Exchange, OpenAiErrors, event, pieces
from prorl_hpc.gateway.calls import Answer, AnswerEnd, ModelCall, Refusal, invalid
from prorl_hpc.gateway.fields import (
    check_conversation,
    check_tools,
    limit_of,
    name_results,
    read_arguments,
    read_fields,
    refuse_others,
)
from prorl_hpc.gateway.session import Session
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema
from prorl_hpc.tasks.protocol import Turn

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ENDS = {
    AnswerEnd.DONE: "stop",
    AnswerEnd.STOP_SEQUENCE: "stop",
    AnswerEnd.CALLS: "tool_calls",
    AnswerEnd.LENGTH: "length",
}
_ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "logit_bias": ({},),
    "top_logprobs": (0,),
}
"""What the policy cannot do, or what would change the distribution that it is trained on."""


class _Part(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(Struct):
    name: str
    arguments: str = ""


class _Call(Struct):
    function: _Function
    id: str = ""


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Tool(Struct):
    type: str
    function: dict[str, Any] | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Request(Struct):
    model: str
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None


class ChatCompletions(OpenAiErrors):
    """See gateway.api.ChatApi."""

    def read(self, body: dict[str, Any], session: Session) -> Exchange:
        refuse_others(body, _ONLY, "the policy writes text, and calls tools when it chooses to")
        request = read_fields(body, _Request)
        messages = [_read_message(message, i) for i, message in enumerate(request.messages)]
        check_conversation(messages)
        name_results(messages)
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        call = ModelCall(
            messages,
            _read_tools(request.tools or []),
            request.tool_choice != "none",
            limit_of("max_completion_tokens", limit),
            tuple(text for text in stop if text),
        )
        return _Exchange(request, call, session.chat)


class _Exchange:
    def __init__(self, request: _Request, call: ModelCall, chat: ChatFormat) -> None:
        self.call = call
        self.stream = bool(request.stream)
        self._request = request
        self._chat = chat
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def answer(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None, "refusal": None}
        if answer.message.reasoning:
            message["reasoning_content"] = answer.message.reasoning
        if answer.message.tool_calls:
            message["tool_calls"] = [_call(made) for made in answer.message.tool_calls]
        elif not answer.message.content:
            message["content"] = ""
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _ENDS[answer.end],
            "logprobs": self._logprobs(answer),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        message = answer.message
        yield self._chunk({"role": "assistant", "content": ""})
        for text in pieces(message.reasoning):
            yield self._chunk({"reasoning_content": text})
        for text in pieces(message.content):
            yield self._chunk({"content": text})
        for i, made in enumerate(message.tool_calls):
            call = _call(made)
            arguments = call["function"].pop("arguments")
            yield self._chunk({"tool_calls": [{"index": i, **call, "function": {**call["function"], "arguments": ""}}]})
            for text in pieces(arguments):
                yield self._chunk({"tool_calls": [{"index": i, "function": {"arguments": text}}]})
        yield self._chunk({}, _ENDS[answer.end], self._logprobs(answer))
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(answer)})
        yield event("[DONE]")

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(OpenAiErrors().refuse(refusal)[1])

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return {"content": token_logprobs(answer.turn, self._chat), "refusal": None}


def token_logprobs(turn: Turn, chat: ChatFormat) -> list[dict[str, Any]]:
    """Of all that was generated, thought and calls too, token by token."""
    found = []
    for token_id, logprob in zip(turn.token_ids, turn.logprobs, strict=True):
        token = chat.decode([token_id], control_tokens=True)
        found.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return found


def _call(made: ToolCall) -> dict[str, Any]:
    function = {"name": made.name, "arguments": json.dumps(made.arguments, ensure_ascii=False)}
    return {"id": made.call_id, "type": "function", "function": function}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _read_message(message: _Message, i: int) -> Message:
    where = f"messages[{i}]"
    if message.role not in _ROLES:
        raise invalid(f"{where}.role", f"{message.role!r} is not possible; allowed: {', '.join(_ROLES)}")
    calls = [
        ToolCall(
            call.function.name,
            read_arguments(call.function.arguments, f"{where}.tool_calls[{k}].function.arguments"),
            call.id,
        )
        for k, call in enumerate(message.tool_calls or [])
    ]
    return Message(
        _ROLES[message.role],
        _text(message.content, f"{where}.content"),
        message.name or "" if message.role == "tool" else "",
        message.tool_call_id or "",
        calls,
        message.reasoning_content or message.reasoning or "",
    )


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for k, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise invalid(f"{where}[{k}]", f"a part of type {part.type!r} is not possible; the policy reads text only")
        texts.append(text)
    return "\n".join(texts)


def _read_tools(tools: list[_Tool]) -> list[ToolSchema]:
    found = []
    for i, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise invalid(f"tools[{i}].type", f"{tool.type!r} is not possible; allowed: function")
        found.append(read_fields(tool.function, _FunctionTool, f"tools[{i}].function").schema())
    check_tools(found)
    return found


class _FunctionTool(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def schema(self) -> ToolSchema:
        return ToolSchema(self.name, self.description or "", self.parameters or {"type": "object", "properties": {}})
