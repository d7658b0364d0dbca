"""Refusals on the wire: ``{"error": {"code", "message", "details"}}``, whatever refused."""

from __future__ import annotations

from typing import Any

import msgspec

from prorl_hpc.messages.errors import ServiceError


class ErrorBody(msgspec.Struct, frozen=True):
    """``code`` is for programs, ``message`` for people."""

    code: str
    message: str
    details: dict[str, Any] = {}


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


class Refusal(ServiceError):
    """A ServiceError with details for programs."""

    def __init__(self, message: str, *, code: str, status: int, details: dict[str, Any] | None = None) -> None:
        super().__init__(message, code=code, status=status)
        self.details = details or {}


def invalid(message: str, field: str) -> Refusal:
    """400: the request is not well-formed; ``field`` is where, as ``$.sampling.top_p``."""
    return Refusal(message, code="invalid_request", status=400, details={"field": field})


def not_found(kind: str, name: str) -> Refusal:
    return Refusal(f"there is no {kind} {name!r} here", code=f"unknown_{kind}", status=404)


def conflict(message: str, code: str, **details: Any) -> Refusal:
    return Refusal(message, code=code, status=409, details=details)


def answer_of(error: ServiceError) -> ErrorAnswer:
    details = error.details if isinstance(error, Refusal) else {}
    return ErrorAnswer(ErrorBody(error.code, str(error), details))
