"""Anthropic Messages: POST /v1/messages, and what it has to say of tokens and errors."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from prorl_hpc.gateway.api import Exchange, event, pieces
from prorl_hpc.gateway.calls import Answer, AnswerEnd, ModelCall, Refusal, Trouble, invalid
from prorl_hpc.gateway.fields import check_conversation, check_tools, limit_of, name_results, read_fields, refuse_others
from prorl_hpc.gateway.session import Session
from prorl_hpc.messages.trajectory import Message, ToolCall, ToolSchema

_STATUS = {
    Trouble.INVALID: (400, "invalid_request_error"),
    Trouble.UNAUTHORIZED: (401, "authentication_error"),
    Trouble.NOT_FOUND: (404, "not_found_error"),
    Trouble.METHOD: (405, "invalid_request_error"),
    Trouble.TOO_LARGE: (413, "request_too_large"),
    Trouble.CONTEXT: (400, "invalid_request_error"),
    Trouble.OVER: (403, "permission_error"),
    Trouble.BROKEN: (500, "api_error"),
}
_ENDS = {
    AnswerEnd.DONE: "end_turn",
    AnswerEnd.STOP_SEQUENCE: "stop_sequence",
    AnswerEnd.CALLS: "tool_use",
    AnswerEnd.LENGTH: "max_tokens",
}
_ONLY: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
}
_SIGNATURE = "prorl"
"""Thinking blocks need one; nobody checks it here."""


class _Block(Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | None = None


class _Message(Struct):
    role: str
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Choice(Struct):
    type: str


class _Thinking(Struct):
    type: str


class _Request(Struct):
    model: str
    messages: list[_Message]
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class AnthropicErrors:
    """How Anthropic's APIs refuse."""

    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        status, kind = _STATUS[refusal.kind]
        return status, {"type": "error", "error": {"type": kind, "message": refusal.message}}


class AnthropicMessages(AnthropicErrors):
    """See gateway.api.ChatApi."""

    def read(self, body: dict[str, Any], session: Session) -> Exchange:
        request, call = _read(body)
        if request.max_tokens is None:
            raise invalid("max_tokens", "the field is missing; a number of tokens, at least 1")
        return _Exchange(request, call)


def read_prompt(body: dict[str, Any]) -> ModelCall:
    """The prompt of a request to count tokens. Raises Refusal."""
    return _read(body)[1]


def _read(body: dict[str, Any]) -> tuple[_Request, ModelCall]:
    refuse_others(body, _ONLY, "the policy writes text, and calls tools when it chooses to")
    request = read_fields(body, _Request)
    choice = request.tool_choice.type if request.tool_choice is not None else "auto"
    if choice not in ("auto", "none"):
        raise invalid(
            "tool_choice.type", f"{choice!r} is not possible (the policy calls tools when it chooses to); auto, none"
        )
    messages = [Message("system", _system(request.system))] if request.system else []
    for i, message in enumerate(request.messages):
        messages += _read_message(message, f"messages[{i}]")
    check_conversation(messages)
    name_results(messages)
    call = ModelCall(
        messages,
        _read_tools(request.tools or []),
        choice == "auto",
        limit_of("max_tokens", request.max_tokens),
        tuple(text for text in request.stop_sequences or [] if text),
    )
    return request, call


class _Exchange:
    def __init__(self, request: _Request, call: ModelCall) -> None:
        self.call = call
        self.stream = bool(request.stream)
        self._model = request.model
        self._thinking = request.thinking is not None and request.thinking.type != "disabled"
        self._id = f"msg_{uuid.uuid4().hex}"

    def answer(self, answer: Answer) -> dict[str, Any]:
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
        return {**self._head(), "content": self._blocks(answer), **_end(answer), "usage": usage}

    def events(self, answer: Answer) -> Iterator[bytes]:
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=start)
        for index, block in enumerate(self._blocks(answer)):
            empty, deltas = _streamed(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_end(answer), usage={"output_tokens": answer.completion_tokens})
        yield _event("message_stop")

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(AnthropicErrors().refuse(refusal)[1], "error")

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _blocks(self, answer: Answer) -> list[dict[str, Any]]:
        message, blocks = answer.message, list[dict[str, Any]]()
        if self._thinking and message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
        if message.content or not message.tool_calls:
            blocks.append({"type": "text", "text": message.content})
        for made in message.tool_calls:
            blocks.append({"type": "tool_use", "id": made.call_id, "name": made.name, "input": made.arguments})
        return blocks


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": text} for text in pieces(block["text"])]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": text} for text in pieces(block["thinking"])]
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
    given = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text} for text in pieces(given)]


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _end(answer: Answer) -> dict[str, Any]:
    return {"stop_reason": _ENDS[answer.end], "stop_sequence": answer.stop_sequence or None}


def _read_message(message: _Message, where: str) -> list[Message]:
    if message.role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"{message.role!r} is not possible; allowed: user, assistant")
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    if message.role == "assistant":
        return [_read_answer(message.content, where)]
    # The results of calls come first, as they do in all other chats.
    results, texts = [], []
    for k, block in enumerate(message.content):
        at = f"{where}.content[{k}]"
        if block.type == "tool_result":
            results.append(Message("tool", _result(block, at), call_id=block.tool_use_id))
        elif block.type == "text":
            texts.append(block.text)
        else:
            raise _unreadable(at, block.type)
    return [*results, Message(message.role, "\n".join(texts))] if texts or not results else results


def _read_answer(blocks: list[_Block], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for k, block in enumerate(blocks):
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            calls.append(ToolCall(block.name, block.input, block.id))
        elif block.type != "redacted_thinking":
            raise _unreadable(f"{where}.content[{k}]", block.type)
    return Message("assistant", "\n".join(texts), tool_calls=calls, reasoning="\n".join(thoughts))


def _result(block: _Block, where: str) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts = []
    for k, part in enumerate(block.content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _unreadable(f"{where}.content[{k}]", str(part.get("type")))
        texts.append(part["text"])
    return "\n".join(texts)


def _system(system: str | list[_Block]) -> str:
    if isinstance(system, str):
        return system
    for k, block in enumerate(system):
        if block.type != "text":
            raise _unreadable(f"system[{k}]", block.type)
    return "\n".join(block.text for block in system)


def _unreadable(where: str, kind: str) -> Refusal:
    return invalid(f"{where}.type", f"a block of type {kind!r} is not possible here; the policy reads text only")


def _read_tools(tools: list[_Tool]) -> list[ToolSchema]:
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise invalid(
                f"tools[{i}].type", f"{tool.type!r} is not possible; allowed: custom tools, with input_schema"
            )
    found = [
        ToolSchema(tool.name, tool.description or "", tool.input_schema or {"type": "object", "properties": {}})
        for tool in tools
    ]
    check_tools(found)
    return found
