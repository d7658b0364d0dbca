"""Patterns for file names: ``*.py``, ``src/**/test_*.{c,h}``."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^]/]*\]|\\.|[{},]|.", re.DOTALL)
_SIMPLE = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def matcher(pattern: str, *, ignore_case: bool = False) -> Callable[[str, str], bool]:
    """A function of (path, name). A pattern with a slash is for the path, any other for the name alone.
    ``re.error`` for what is no pattern."""
    of_path = "/" in pattern
    expression = re.compile(to_regex(pattern.lstrip("/")), re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    return lambda path, name: expression.fullmatch(path if of_path else name) is not None


def lone_brackets(pattern: str) -> str:
    """``[`` or ``{`` where it is open at the end, and taken as itself; else empty."""
    if "[" in _TOKEN.findall(pattern):
        return "["
    return "{" if pattern.count("{") > pattern.count("}") else ""


def to_regex(pattern: str) -> str:
    """``*`` and ``?`` stay within a directory, ``**`` does not; ``[a-z]``, ``[!a]``, ``{a,b}`` and a backslash before a
    special character are as in a shell."""
    found, depth = "", 0
    for token in _TOKEN.findall(pattern):
        if token in _SIMPLE:
            found += _SIMPLE[token]
        elif token[0] == "[" and len(token) > 2:
            negated = token[1] == "!"
            inside = token[2 if negated else 1 : -1].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            found += f"[{'^/' if negated else ''}{inside}]"
        elif token == "{" and pattern.count("{") == pattern.count("}"):
            depth += 1
            found += "(?:"
        elif token == "}" and depth:
            depth -= 1
            found += ")"
        elif token == "," and depth:
            found += "|"
        else:
            found += re.escape(token[1:] if len(token) > 1 and token[0] == "\\" else token)
    return found + ")" * depth
