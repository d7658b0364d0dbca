"""Query parameters: what each may be, read strictly, and told to the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.datastructures import QueryParams

from prorl_hpc.messages.rollout import Status
from prorl_hpc.service.errors import invalid

T = TypeVar("T")
_INTEGER = re.compile(r"-?[0-9]{1,19}\Z")
_NUMBER = re.compile(r"-?[0-9]{1,19}(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?\Z")
MAX_TEXT = 256
MAX_CURSOR = 2**63 - 1


@dataclass(frozen=True)
class Parameter(Generic[T]):
    """``read`` raises ValueError with what was expected."""

    name: str
    description: str
    default: T
    schema: dict[str, Any]
    read: Callable[[str], T]


class Query:
    """The query of one call. Raises Refusal 400 for a parameter that is unknown, comes twice, or is out of range."""

    def __init__(self, given: QueryParams, allowed: Iterable[Parameter[Any]]) -> None:
        known = {parameter.name: parameter for parameter in allowed}
        self._values: dict[str, Any] = {}
        for name, text in given.multi_items():
            if name not in known:
                names = ", ".join(known) or "none"
                raise invalid(f"unknown query parameter {name[:MAX_TEXT]!r}; allowed: {names}", name[:MAX_TEXT])
            if name in self._values:
                raise invalid(f"query parameter {name} comes twice", name)
            try:
                self._values[name] = known[name].read(text)
            except ValueError as error:
                raise invalid(f"{name} is {text[:MAX_TEXT]!r}: expected {error}", name) from error

    def get(self, parameter: Parameter[T]) -> T:
        value: T = self._values.get(parameter.name, parameter.default)
        return value


def _number(name: str, description: str, low: float, high: float, default: float) -> Parameter[float]:
    def read(text: str) -> float:
        if not _NUMBER.match(text) or not low <= float(text) <= high:
            raise ValueError(f"{low:g} to {high:g}")
        return float(text)

    schema = {"type": "number", "minimum": low, "maximum": high, "default": default}
    return Parameter(name, description, default, schema, read)


def _integer(name: str, description: str, low: int, high: int, default: T) -> Parameter[int | T]:
    def read(text: str) -> int:
        if not _INTEGER.match(text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number, {low} to {high}")
        return int(text)

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Parameter(name, description, default, schema | ({} if default is None else {"default": default}), read)


def _flag(name: str, description: str, default: bool) -> Parameter[bool]:
    def read(text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError("true or false")
        return text == "true"

    return Parameter(name, description, default, {"type": "boolean", "default": default}, read)


def _text(name: str, description: str) -> Parameter[str]:
    def read(text: str) -> str:
        if len(text) > MAX_TEXT:
            raise ValueError(f"at most {MAX_TEXT} characters")
        return text

    return Parameter(name, description, "", {"type": "string", "maxLength": MAX_TEXT}, read)


def _status(text: str) -> Status | None:
    try:
        return Status(text)
    except ValueError:
        raise ValueError(f"one of {', '.join(Status)}") from None


HOLDER = _text("holder", "whose pause for a while it is; empty: the lasting one, of everybody")
FOR_S = _number(
    "for_s", "seconds after which the holder's pause ends by itself; 0: it lasts, and has no holder", 0, 3600, 0
)
WAIT_S = _number("wait_s", "seconds to wait for the result", 0, 60, 0)
AFTER = _text("after", "the last id of the page before; empty: from the first")
PAGE_LIMIT = _integer("limit", "the most that one page holds", 1, 1000, 100)
BATCH_ID = _text("batch_id", "only rollouts of this batch; empty: all")
POLICY = _text("policy", "only rollouts of this policy; empty: all")
STATUS: Parameter[Status | None] = Parameter(
    "status", "only rollouts that stand here", None, {"type": "string", "enum": list(Status)}, _status
)
CURSOR = _integer("cursor", "go on behind the line with this cursor; 0: from the first", 0, MAX_CURSOR, 0)
LINE_LIMIT: Parameter[int | None] = _integer("limit", "end after so many results; absent: no limit", 1, 10**6, None)
FOLLOW = _flag("follow", "wait for results to come instead of ending behind the last", False)
TRAJECTORIES = _flag("trajectories", "false: leave the trajectories empty", True)
