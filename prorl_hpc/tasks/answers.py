"""Final answers as text: where one is in what a model wrote, and whether it is the right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_ANSWER = re.compile(
    r"^[^\w\n]*+(?:the ++)?(?:final ++)?answer(?: ++is)?[^\w\n:=]*+[:=](.*\S)", re.IGNORECASE | re.MULTILINE
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?(?:\s*/\s*\d+)?", re.IGNORECASE)
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?:\D|\Z))")
_CHOICE = re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z])")
_TOLERANCE = Fraction(1, 10**6)
_LONGEST_NUMBER = 60


def final_answer(text: str) -> str:
    """What is in the last ``\\boxed{…}``, else what the last line ``answer: …`` says, else all of it; without white space
    around."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    said = list(_ANSWER.finditer(text))
    if not said:
        return text.strip()
    rest = said[-1][1].strip()
    return rest.lstrip(" \t*").rstrip(" \t*.").strip() or rest[0]


def exact(answer: str, truth: str) -> bool:
    """The same text, white space between words apart."""
    return answer.split() == truth.split()


def numeric(answer: str, truth: str) -> bool:
    """The last number of ``answer`` (12, -3.5, 1,234, 2/3, 1e6, 50%) is that of ``truth``, to one millionth of it."""
    got, right = last_number(answer), last_number(truth)
    return got is not None and right is not None and abs(got - right) <= _TOLERANCE * abs(right)


def choice(answer: str, truth: str) -> bool:
    """The last single capital letter of ``answer``: "B", "(B)", "B)"; or the whole answer is the letter in lower case."""
    if len(answer.strip()) == 1:
        return answer.strip().upper() == truth.strip().upper()
    letters = _CHOICE.findall(answer)
    return bool(letters) and letters[-1] == truth.strip().upper()


COMPARE: dict[str, Callable[[str, str], bool]] = {"exact": exact, "numeric": numeric, "choice": choice}
"""(answer, truth) → whether it is right; ``answer`` as final_answer gives it."""


def last_number(text: str) -> Fraction | None:
    """None if there is none, or none of sensible length."""
    found = [number for number in _NUMBER.finditer(_GROUPED.sub("", text)) if len(number[0]) <= _LONGEST_NUMBER]
    if not found:
        return None
    above, _, below = found[-1][0].partition("/")
    if below and int(below) == 0:
        return None
    value = Fraction(above.strip()) / (int(below) if below else 1)
    return value / 100 if found[-1].string[found[-1].end() :].lstrip().startswith("%") else value


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = at = start + len("\\boxed{")
    depth = 1
    while at < len(text):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[begin:at]
        at += 1
    return None
