"""``bench conformance``: our losses, their gradients and our advantages against numbers that other libraries computed.

The fixtures in ``conformance_data`` were written by ``scripts/make_conformance_fixtures.py``; nothing of the peers is needed
to compare with them.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts
from prorl_hpc.messages.errors import RunError

PARTS = {
    "verl": "losses, corrections, value loss, advantages and GAE against verl's",
    "trl": "GRPOTrainer's loss of GRPO, Dr. GRPO, DAPO, GSPO, CISPO, and soft overlong punishment",
}
GOAL = 1e-5
_FLOOR = 1e-3
"""Errors of numbers near zero are held against this share of the largest number of the same tensor."""
CASES = {"verl": 145, "trl": 40}
"""How many were recorded: fixtures that lost some would agree all the better."""
_ANSWERS = {
    "loss": {"loss", "gradients"},
    "advantages": {"advantages"},
    "gae": {"advantages", "returns"},
    "overlong": {"punishments"},
}
"""What a case of each kind expects."""
_CURE = "Bring prorl_hpc/bench/conformance_data back, or make it anew with scripts/make_conformance_fixtures.py"
_TITLES = {
    "loss": "losses",
    "gradients": "gradients",
    "advantages": "advantages",
    "returns": "returns",
    "punishments": "length penalties",
}


class Case(msgspec.Struct, frozen=True):
    """``kind``, ``settings`` and ``inputs`` as ``trainer.conformance.answer`` takes them, ``expected`` as it answers."""

    name: str
    kind: str
    settings: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]


class Fixtures(msgspec.Struct, frozen=True):
    """What one version of a peer computed."""

    peer: str
    version: str
    torch: str
    made_by: str
    cases: list[Case]


@dataclass(frozen=True)
class Deviation:
    """Largest relative error of one quantity of one case."""

    quantity: str
    case: str
    error: float


@cache
def fixtures(peer: str) -> Fixtures:
    """Those that the package brings. RunError where they cannot be read."""
    try:
        text = files("prorl_hpc.bench").joinpath("conformance_data", f"{peer}.json").read_text()
        return msgspec.convert(json.loads(text), Fixtures)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise RunError(f"the fixtures of {peer} cannot be read: {error}. {_CURE}") from error


def deviations(case: Case, dtype: str) -> list[Deviation]:
    """Of each quantity that the peer computed. ``dtype``: float32, as in training, or float64. RunError for a case that is none."""
    from prorl_hpc.trainer.conformance import answer

    if case.expected.keys() != _ANSWERS.get(case.kind):
        known = "; ".join(f"{kind} with {', '.join(names)}" for kind, names in _ANSWERS.items())
        raise RunError(
            f"case {case.name!r} of the fixtures is damaged: it is of kind {case.kind!r} and expects "
            f"{', '.join(case.expected) or 'nothing'}; there are {known}. {_CURE}"
        )
    try:
        found = answer(case.kind, case.settings, case.inputs, dtype)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"case {case.name!r} cannot be computed: {type(error).__name__}: {error}. {_CURE}") from error
    return [
        Deviation(quantity, case.name, relative_error(found[quantity], expected))
        for quantity, expected in case.expected.items()
    ]


def relative_error(found: Any, expected: Any) -> float:
    """Largest |found − expected| / |expected| of numbers, nested lists or dictionaries of them; a number near zero is held
    against 1/1000 of the largest of its tensor. Infinite where a number is missing on either side or is none."""
    if isinstance(expected, dict):
        if not expected or found.keys() != expected.keys():
            return math.inf
        return max(relative_error(found[name], each) for name, each in expected.items())
    ours, theirs = list(_numbers(found)), list(_numbers(expected))
    if not theirs or len(ours) != len(theirs) or not all(map(math.isfinite, (*ours, *theirs))):
        return math.inf
    floor = _FLOOR * max(map(abs, theirs)) or 1.0
    return max(abs(a - b) / max(abs(b), floor) for a, b in zip(ours, theirs, strict=True))


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    """``quick``: in float32 alone."""
    return measure_parts(
        PARTS, parts, say, lambda part: _against(part, ("float32",) if quick else ("float32", "float64"))
    )


def _against(peer: str, dtypes: Sequence[str]) -> list[Figure]:
    if importlib.util.find_spec("torch") is None:
        raise RunError(
            "bench conformance computes the trainer's losses, and torch is not installed: run scripts/setup.sh"
        )
    known = fixtures(peer)
    found = [deviation for dtype in dtypes for case in known.cases for deviation in deviations(case, dtype)]
    by = f"{known.peer} {known.version}"
    figures = [Figure.exactly(f"{known.peer}: cases", len({c.name for c in known.cases}), CASES[peer], "", by)]
    for quantity, title in _TITLES.items():
        if of_quantity := [d for d in found if d.quantity == quantity]:
            worst = max(of_quantity, key=lambda d: d.error)
            figures.append(
                Figure.at_most(
                    f"{known.peer}: {title}",
                    worst.error,
                    GOAL,
                    "",
                    by,
                    f"largest relative error of {len(of_quantity)} answers in {' and '.join(dtypes)}; worst: {worst.case}",
                )
            )
    return figures


def _numbers(found: Any) -> Iterator[float]:
    if isinstance(found, list):
        for each in found:
            yield from _numbers(each)
    else:
        yield float(found)
