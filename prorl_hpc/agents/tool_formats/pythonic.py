"""Llama 3.2, Llama 4 and others: ``[f(a=1), g(b="x")]``, perhaps between ``<|python_start|>`` and ``<|python_end|>``."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Sequence
from typing import Any

from prorl_hpc.agents.tool_formats.reading import Malformed, TurnReader, carriable_problem, shown
from prorl_hpc.agents.turns import ParsedTurn
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_OPEN = re.compile(r"(?:<\|python_start\|>\s*|^[ \t]*)(?=\[\s*[A-Za-z_][\w.]*\s*\()|<\|python_start\|>", re.MULTILINE)
_END = re.compile(r"\s*(?:<\|python_end\|>)?")
_CLOSE = re.compile(r"<\|python_end\|>|\n")
_SIGN = re.compile(r'"""|\'\'\'|["\'()\[\]{}]')
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_EXAMPLE = "[TOOL(NAME=value, …)]"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Pythonic:
    """A ToolFormat."""

    name = "pythonic"

    def parse(self, raw: str, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        turn = TurnReader(raw, _OPEN)
        while turn.seek_call():
            try:
                turn.add(*_calls(_expression(turn)))
                turn.take(_END)
            except Malformed as error:
                turn.add_problem(f"a list of calls {error}: write {_EXAMPLE}")
                turn.skip_to(_CLOSE)
        return turn.parsed(tools)

    def write(self, call: ToolCall) -> str:
        """ValueError where the tool's name is none that Python can call."""
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in call.name.split(".")):
            raise ValueError(f"the format pythonic cannot write the tool's name {call.name!r}: no Python name")
        plain = {name: value for name, value in call.arguments.items() if _is_argument_name(name)}
        others = {name: value for name, value in call.arguments.items() if name not in plain}
        arguments = [f"{name}={value!r}" for name, value in plain.items()]
        return f"[{call.name}({', '.join([*arguments, *([f'**{others!r}'] if others else [])])})]"


def read_call(turn: TurnReader, name: str) -> ToolCall:
    """Go past the ``(a=1)`` of a call of ``name``. Raises Malformed."""
    return _call(_parse(f"{name}{_expression(turn)}"))


def _is_argument_name(name: str) -> bool:
    # Python reads names in their normal form, so that only plain ones are sure to come back.
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _expression(turn: TurnReader) -> str:
    """Go past what is in brackets here, strings in it considered."""
    text, at, depth = turn.text, turn.at, 0
    while sign := _SIGN.search(text, at):
        if sign[0] in _BRACKETS:
            at = sign.end()
            depth += _BRACKETS[sign[0]]
            if depth <= 0:
                start, turn.at = turn.at, at
                return text[start:at]
        else:
            at = _end_of_string(text, sign)
    raise Malformed("is cut off before its brackets close")


def _end_of_string(text: str, quote: re.Match[str]) -> int:
    end = re.compile(rf"(?:\\.|(?!{quote[0]})[^\\])*+{quote[0]}", re.DOTALL).match(text, quote.end())
    if end is None:
        raise Malformed("is cut off inside a string")
    return end.end()


def _parse(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise Malformed(f"is not Python ({error.msg} in {shown(text)})") from None
    except (ValueError, MemoryError, RecursionError):
        raise Malformed(f"cannot be read as Python ({shown(text)})") from None


def _calls(text: str) -> list[ToolCall]:
    tree = _parse(text)
    return [_call(element) for element in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _call(node: ast.expr) -> ToolCall:
    name = _dotted(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or not name:
        raise Malformed(f"has {shown(_source(node))} in it, expected TOOL(…)")
    if node.args:
        raise Malformed(f"gives {name} an argument without its name: {shown(_source(node.args[0]))}")
    arguments: dict[str, Any] = {}
    for given in node.keywords:
        try:
            value = _literal(given.value)
        except RecursionError:
            raise Malformed(f"of {name} is nested too deeply") from None
        if given.arg is None and not isinstance(value, dict):
            raise Malformed(f"gives {name} a ** that is no object")
        arguments |= value if given.arg is None else {given.arg: value}
    if problem := carriable_problem(arguments):
        raise Malformed(f"of {name} {problem}")
    return ToolCall(name, arguments)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | str() | bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _literal(value) for key, value in pairs}
    raise Malformed(f"has {shown(_source(node))} as a value, expected a literal (text in quotes)")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Malformed("has an object whose names are not all text in quotes")


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except (RecursionError, ValueError):  # a number of very many digits, or an f-string that it has no quotes for
        return "an expression that cannot be shown"
