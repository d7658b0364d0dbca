"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=X>value</parameter>…</function></tool_call>``.

All values are text: ``tools`` tells which are numbers, objects and so on. Without it, what reads as JSON is JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, carriable_problem, read_json, write_json
from prorl_hpc.agents.tool_formats.schemas import properties_of, tool_named, types_of
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_OPEN = re.compile(r"(?:<tool_call>\s*+)?<function=([^<>\n]*+)>|<tool_call>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]*+)>")
_VALUE = re.compile(r"\n?(.*?)\n?</parameter>", re.DOTALL)
_END = re.compile(r"\s*+</function>(?:\s*+</tool_call>)?")
_CLOSE = re.compile(r"</function>(?:\s*</tool_call>)?|</tool_call>")
_EXAMPLE = "<tool_call>\n<function=TOOL>\n<parameter=NAME>\nvalue\n</parameter>\n</function>\n</tool_call>"
_PYTHON = {"True": True, "False": False, "None": None}
"""As some templates write them into the history that a model imitates."""


class QwenXml:
    """A ToolFormat."""

    name = "qwen_xml"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        while opening := turn.seek_call():
            try:
                turn.add(self._call(turn, opening[1], tools))
            except Malformed as error:
                turn.add_problem(f"a <tool_call> {error}: write {_EXAMPLE}")
                turn.skip_to(_CLOSE)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        """ValueError where the format has no way to write a name or a value."""
        lines = ["<tool_call>", f"<function={_name(call.name)}>"]
        for name, value in call.arguments.items():
            text = value if isinstance(value, str) else write_json(value)
            if "</parameter>" in text:
                raise ValueError(f"argument {name} has </parameter> in it, which ends a value in the format qwen_xml")
            lines += [f"<parameter={_name(name)}>", text, "</parameter>"]
        return "\n".join([*lines, "</function>", "</tool_call>"])

    def _call(self, turn: TurnReader, name: str | None, tools: Sequence[ToolSchema]) -> ToolCall:
        if not name:
            raise Malformed("names no tool: <function=…> is missing")
        properties = properties_of(tool_named(name, tools))
        arguments: dict[str, Any] = {}
        while parameter := turn.take(_PARAMETER):
            value = turn.take(_VALUE)
            if value is None:
                raise Malformed(f"of {name} is cut off: its parameter {parameter[1]} has no </parameter>")
            arguments[parameter[1]] = _typed(value[1], types_of(properties.get(parameter[1])))
        turn.expect(_END, "<parameter=…> or </function>")
        return ToolCall(name, arguments)


def _name(name: str) -> str:
    if not name or any(sign in name for sign in "<>\n"):
        raise ValueError(
            f"the format qwen_xml cannot write the name {name!r}: it must have no <, no > and no line break"
        )
    return name


def _typed(text: str, types: frozenset[str]) -> Any:
    """``text`` as one of ``types`` (empty: any); as it is if it is none, which the check of types then says. Malformed if it is
    an object or array that no message can carry."""
    if types == {"string"}:
        return text
    try:
        value = _value(text.strip())
    except Malformed:
        if "string" in types:
            return text
        raise
    fits = not types or types_of_value(value) & types
    return value if fits and not isinstance(value, str) else text


def types_of_value(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, float):
        return frozenset({"number"})
    names = {int: {"integer", "number"}, list: {"array"}, dict: {"object"}, type(None): {"null"}}
    return frozenset(names.get(type(value), {"string"}))


def _value(text: str) -> Any:
    if text in _PYTHON:
        return _PYTHON[text]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value, end = read_json(text, 0)
        return text if end != len(text) else value
    except Malformed:
        return _python_literal(text) if text[:1] in ("[", "{") else text


def _python_literal(text: str) -> Any:
    """Objects as Python prints them; the text itself if it is none that JSON has. Malformed if no message can carry it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            value = json.loads(write_json(ast.literal_eval(text)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    if problem := carriable_problem(value):
        raise Malformed(problem)
    return value
