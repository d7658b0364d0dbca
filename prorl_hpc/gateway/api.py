"""What the gateway needs of a chat API. Implemented by chat_completions, responses and anthropic_messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from prorl_hpc.gateway.calls import Answer, ModelCall, Refusal, Trouble
from prorl_hpc.gateway.session import Session

OPENAI_STATUS = {
    Trouble.INVALID: (400, "invalid_request_error", None),
    Trouble.UNAUTHORIZED: (401, "invalid_request_error", "invalid_api_key"),
    Trouble.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    Trouble.METHOD: (405, "invalid_request_error", "method_not_allowed"),
    Trouble.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    Trouble.CONTEXT: (400, "invalid_request_error", "context_length_exceeded"),
    # Not 429: clients take that as "soon again", and go on asking for minutes.
    Trouble.OVER: (403, "permission_error", "rollout_over"),
    Trouble.BROKEN: (500, "server_error", "llm_server_broken"),
}


class Exchange(Protocol):
    """One request that was read, and the ways to answer it."""

    call: ModelCall
    stream: bool

    def answer(self, answer: Answer) -> dict[str, Any]: ...

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The same as server-sent events."""
        ...

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        """Events of a stream that ends with ``refusal``."""
        ...


@dataclass(frozen=True)
class OpenAiErrors:
    """How OpenAI's APIs refuse."""

    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        status, kind, code = OPENAI_STATUS[refusal.kind]
        error = {"message": refusal.message, "type": kind, "param": refusal.field or None, "code": code}
        return status, {"error": error}


class Errors(Protocol):
    def refuse(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        ...


class ChatApi(Errors, Protocol):
    def read(self, body: dict[str, Any], session: Session) -> Exchange:
        """Raises Refusal."""
        ...


def event(data: dict[str, Any] | str, name: str = "") -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


def pieces(text: str, size: int = 400) -> Iterator[str]:
    """``text`` as the deltas of a stream; nothing if it is empty."""
    yield from (text[at : at + size] for at in range(0, len(text), size))
