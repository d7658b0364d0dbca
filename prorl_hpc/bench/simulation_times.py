"""Distributions of stage times, written as text: ``constant:3``, ``lognormal:30:0.7``, ``0.9*uniform:1:2+0.1*constant:60``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prorl_hpc.messages.errors import ConfigError

Floats: TypeAlias = npt.NDArray[np.float64]

GRAMMAR = (
    "a number of seconds, constant:S, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, exponential:MEAN, "
    "or a mixture of these, 0.9*lognormal:30:0.5+0.1*constant:300"
)


@dataclass(frozen=True)
class Distribution:
    """Weighted parts; each part draws n values, seconds."""

    parts: tuple[tuple[float, Callable[[np.random.Generator, int], Floats]], ...]

    def draw(self, rng: np.random.Generator, n: int) -> Floats:
        """``n`` independent values. Every part is drawn in full, so that the mixture uses as many random numbers
        whatever comes out."""
        if len(self.parts) == 1:
            return self.parts[0][1](rng, n)
        weights = np.array([weight for weight, _ in self.parts])
        which = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(n), side="right")
        values = np.empty(n)
        for number, (_, draw) in enumerate(self.parts):
            drawn, chosen = draw(rng, n), which == number
            values[chosen] = drawn[chosen]
        return values


def _constant(seconds: float) -> Callable[[np.random.Generator, int], Floats]:
    return lambda rng, n: np.full(n, seconds)


def _uniform(low: float, high: float) -> Callable[[np.random.Generator, int], Floats]:
    if low > high:
        raise ValueError("LOW is above HIGH")
    return lambda rng, n: rng.uniform(low, high, n)


def _lognormal(median: float, sigma: float) -> Callable[[np.random.Generator, int], Floats]:
    if median <= 0:
        raise ValueError("MEDIAN must be above 0")
    return lambda rng, n: rng.lognormal(math.log(median), sigma, n)


def _exponential(mean: float) -> Callable[[np.random.Generator, int], Floats]:
    return lambda rng, n: rng.exponential(mean, n)


_KINDS: dict[str, tuple[int, Callable[..., Callable[[np.random.Generator, int], Floats]]]] = {
    "constant": (1, _constant),
    "uniform": (2, _uniform),
    "lognormal": (2, _lognormal),
    "exponential": (1, _exponential),
}


def parse_distribution(text: str, setting: str) -> Distribution:
    """``setting`` names it in the ConfigError that a text outside the grammar raises."""
    parts = []
    try:
        for part in re.split(r"(?<![eE])\+", text.strip()):
            weight, star, plain = part.rpartition("*")
            parts.append((_number(weight) if star else 1.0, _parse_one(plain.strip())))
        if sum(weight for weight, _ in parts) <= 0:
            raise ValueError("the weights add up to 0")
    except ValueError as error:
        raise ConfigError(f"{setting}={text}: {error}. Allowed: {GRAMMAR}") from error
    return Distribution(tuple(parts))


def _parse_one(text: str) -> Callable[[np.random.Generator, int], Floats]:
    kind, *numbers = text.split(":")
    if kind not in _KINDS:
        if numbers:
            raise ValueError(f"there is no distribution {kind}")
        kind, numbers = "constant", [text]
    wanted, make = _KINDS[kind]
    if len(numbers) != wanted:
        raise ValueError(f"{kind} takes {wanted} number{'s' if wanted > 1 else ''}, not {len(numbers)}")
    return make(*map(_number, numbers))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text.strip() or 'nothing'} is not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{text.strip()} must be finite and not negative")
    return value
