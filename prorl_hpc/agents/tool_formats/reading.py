"""Reading a turn from left to right: thought, text, calls, and what is wrong with them.

Whatever a model may write is only ever a ``Malformed``, which a format turns into a problem for the model to read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prorl_hpc.agents.tool_formats.schemas import problem_of_call
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_SHOWN_CHARS = 40
_MOST_PROBLEMS = 8
"""In one turn; a model that goes wild needs to read no more, and reading stays quick."""
_MOST_LEVELS = 100
"""Of objects and arrays in each other; what reads and writes messages recurses, and Python's stack is finite."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_HALF_PAIR = "half of a surrogate pair in a string (\\ud800 to \\udfff)"
_PROBLEM_CHARS = 1000
"""Of one problem, which may quote a name of any length."""
_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """What was written is no call; the text says why, as the end of a sentence. ``at``: it could be read up to there."""

    def __init__(self, why: str, at: int = 0) -> None:
        super().__init__(why)
        self.at = at


class TurnReader:
    """A position in a turn's text, and what was found before it. ``call``: where the format's calls begin; what is thought
    ends before."""

    def __init__(self, raw: str, call: re.Pattern[str]) -> None:
        thought, self.text = split_thought(raw, call)
        self._reasoning = [thought]
        self.at = 0
        self._call = call
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._problems: list[str] = []

    def seek_call(self) -> re.Match[str] | None:
        """Go to where the next call begins; the text before it is content. After too many problems nothing more is read."""
        if len(self._problems) >= _MOST_PROBLEMS:
            self.at = len(self.text)
            return None
        match = self._call.search(self.text, self.at)
        self._content.append(self.text[self.at : match.start() if match else len(self.text)])
        self.at = match.end() if match else len(self.text)
        return match

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Go past ``pattern`` if it comes next."""
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Go past ``pattern``; Malformed if it does not come next."""
        match = self.take(pattern)
        if match is None:
            rest = self.text[self.at :].strip()
            raise Malformed(
                f"goes on with {shown(rest)} where {what} is expected" if rest else f"is cut off before {what}"
            )
        return match

    def read_value(self) -> Any:
        """Go past a JSON value; Malformed if none comes next."""
        self.take(_SPACE)
        try:
            value, self.at = read_json(self.text, self.at)
        except Malformed as error:
            self.at = max(self.at, error.at)  # so that no text is read twice, however long it is
            raise
        return value

    def read_object(self) -> dict[str, Any]:
        """Go past a JSON object; Malformed if none comes next."""
        value = self.read_value()
        if not isinstance(value, dict):
            raise Malformed(f"is {kind_of(value)}, expected a JSON object")
        return value

    def skip_to(self, pattern: re.Pattern[str]) -> None:
        """Go past the next ``pattern``, at most to where another call begins: the rest of what is malformed."""
        end = pattern.search(self.text, self.at)
        begin = self._call.search(self.text, self.at)
        if end and (begin is None or end.start() <= begin.start()):
            self.at = end.end()
        else:
            self.at = begin.start() if begin else len(self.text)

    def add(self, *calls: ToolCall) -> None:
        """Of calls that no message can carry, only a problem is kept."""
        for call in calls:
            if problem := carriable_problem([call.name, call.arguments, call.call_id]):
                self.add_problem(f"the call of {shown(call.name)} {problem}")
            else:
                self._calls.append(call)

    def add_content(self, text: str) -> None:
        self._content.append(text)

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def add_problem(self, problem: str) -> None:
        if len(problem) > _PROBLEM_CHARS:
            problem = f"{problem[: _PROBLEM_CHARS // 2]} … {problem[-_PROBLEM_CHARS // 2 :]}"
        self._problems.append(problem)

    def parsed(self, tools: Sequence[ToolSchema]) -> ParsedTurn:
        """All of it, the calls checked against ``tools``."""
        unreadable = "; ".join(self._problems)
        problems = [*self._problems, *call_problems(self._calls, tools).values()]
        return ParsedTurn(
            _paragraphs(self._content),
            _paragraphs(self._reasoning),
            tuple(self._calls),
            "; ".join(problems),
            unreadable,
        )


def _paragraphs(parts: Sequence[str]) -> str:
    return "\n".join(text for part in parts if (text := part.strip()))


def call_problems(calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> dict[int, str]:
    """What is wrong with each of a turn's calls, by its number in the turn: unknown, of wrong arguments, or repeated."""
    found: dict[int, str] = {}
    seen: set[str] = set()
    for number, call in enumerate(calls):
        text = call_text(call)
        if problem := problem_of_call(call, tools):
            found[number] = problem
        elif text in seen:
            found[number] = f"{call.name[:60]} is called twice in one turn with the same arguments: it runs once"
        seen.add(text)
    return found


def call_text(call: ToolCall) -> str:
    """Equal for calls of the same tool with the same arguments."""
    return json.dumps([call.name, call.arguments], sort_keys=True)


def split_thought(raw: str, call: re.Pattern[str]) -> tuple[str, str]:
    """Thought, and the rest of the turn. The prompt may have opened the thought, so that the turn has only its end; then
    no call comes before it."""
    for begin, end in THOUGHTS:
        if raw.lstrip().startswith(begin):
            thought, _, rest = raw.lstrip()[len(begin) :].partition(end)
            return thought.strip(), rest
    for _, end in THOUGHTS:
        thought, found, rest = raw.partition(end)
        if found and call.search(thought) is None:
            return thought.strip(), rest
    return "", raw


# JSON


def read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at ``at``, and where it ends. Malformed also for what JSON has not or no message can carry:
    NaN, numbers of more than 64 bits, half of a surrogate pair. Line breaks inside strings are taken as they are."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        if not rest or error.msg.startswith("Unterminated"):
            raise Malformed("is cut off before its JSON ends", error.pos) from None
        raise Malformed(f"is not JSON ({error.msg} at {shown(rest)})", error.pos) from None
    except RecursionError:
        raise Malformed("is JSON that is nested too deeply", len(text)) from None
    if problem := carriable_problem(value):
        raise Malformed(problem, end)
    return value, end


def carriable_problem(arguments: object) -> str:
    """Why no message can carry ``arguments`` (in MessagePack and in JSON of UTF-8), as the end of a sentence; empty if one
    can. Takes any value whatever, also one that is nested deeper than Python recurses."""
    level, depth = [arguments], 0
    while level:
        depth += 1
        if depth > _MOST_LEVELS:
            return f"has values that are nested too deeply (more than {_MOST_LEVELS} levels)"
        inner: list[object] = []
        for value in level:
            if problem := _value_problem(value):
                return problem
            if isinstance(value, Mapping):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, list | tuple):
                inner += value
        level = inner
    return ""


def _value_problem(value: object) -> str:
    match value:
        case None | bool():
            return ""
        case str():
            return "" if value.isascii() or not _SURROGATE.search(value) else f"has {_HALF_PAIR}"
        case int():
            return "" if -(2**63) <= value < 2**64 else "has a number of more than 64 bits"
        case float():
            return "" if math.isfinite(value) else "has NaN or an infinite number, which JSON does not have"
        case Mapping():
            return "" if all(isinstance(key, str) for key in value) else "has an object whose names are not all text"
        case list() | tuple():
            return ""
    return f"has a value that JSON does not have ({type(value).__name__})"


def object_from(text: str) -> dict[str, Any]:
    """``text`` as one JSON object; Malformed if it is not."""
    value, end = read_json(text, len(text) - len(text.lstrip()))
    if rest := text[end:].strip():
        raise Malformed(f"goes on with {shown(rest)} after its JSON")
    if not isinstance(value, dict):
        raise Malformed(f"is {kind_of(value)}, expected a JSON object")
    return value


def call_from(value: dict[str, Any], *, text_arguments: bool = False) -> ToolCall:
    """{"name": …, "arguments" or "parameters": {…}, "id": …}. ``text_arguments``: they may be JSON in a string. Raises
    Malformed."""
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Malformed('has no "name", the tool\'s')
    arguments = value.get("arguments", value.get("parameters"))
    if text_arguments and isinstance(arguments, str):
        arguments = object_from(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed(f"of {name} has arguments that are {kind_of(arguments)}, expected an object")
    call_id = value.get("id")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def kind_of(value: Any) -> str:
    """In JSON's words."""
    kinds = {
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def shown(text: str) -> str:
    """The beginning of ``text``, quoted."""
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")


def whole_number(text: str) -> int:
    """Malformed if it needs more than 64 bits, which no message carries."""
    if len(text) > 20 or not -(2**63) <= (number := int(text)) < 2**64:
        raise Malformed(f"has a number of more than 64 bits ({shown(text)})")
    return number


def finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Malformed(f"has a number that is too large ({shown(text)})")
    return number


def _no_constant(name: str) -> Any:
    raise Malformed(f"has {name}, which is not JSON")


_DECODER = json.JSONDecoder(
    strict=False, parse_int=whole_number, parse_float=finite_number, parse_constant=_no_constant
)
