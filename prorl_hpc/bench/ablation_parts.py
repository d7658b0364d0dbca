"""What an ablation is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prorl_hpc.bench.scaling_records import LoadOrder, PointFigures

_DIGITS = 2
"""Decimals of a percentage that say something; what is alike to them is no difference."""


@dataclass(frozen=True)
class Measure:
    """A number of a point, compared between variants.

    ``of`` gives None where the point has none; then ``absent`` says why. ``less``: less is better. ``points``: the gain is
    a difference (of percents), not a ratio. ``goal`` of the gain, against the variant ``against`` (empty: each); ``strictly``: must be
    more. ``paper``: the seed's figure. ``samples``: what ``of`` is the mean of. ``rate``: ``of`` is the steady rate.
    """

    name: str
    unit: str
    of: Callable[[PointFigures], float | None]
    less: bool = False
    points: bool = False
    goal: float | None = None
    strictly: bool = False
    against: str = ""
    paper: str = ""
    absent: str = "the run has no such figure"
    samples: Callable[[PointFigures], Sequence[float]] = lambda figures: ()
    rate: bool = False

    def spread(self, figures: PointFigures) -> str:
        """Of what the value is the mean; empty where it is none."""
        values = self.samples(figures)
        return f" (mean of {len(values)}: {min(values):.3g} to {max(values):.3g})" if values else ""

    def words(self, value: float) -> str:
        """With the unit."""
        return f"{value:.{_DIGITS}f} {self.unit}" if self.points else f"{value:.4g} {self.unit}"

    @property
    def gain_unit(self) -> str:
        return "points" if self.points else "x"

    def gain(self, ours: float, other: float) -> float | None:
        """Above 1 (points: above 0, and to the digits that ``words`` shows) where ours is better; None for a ratio with
        nothing."""
        if self.points:
            difference = round(ours, _DIGITS) - round(other, _DIGITS)
            return round(-difference if self.less else difference, _DIGITS) + 0.0
        better, worse = (other, ours) if self.less else (ours, other)
        return better / worse if worse > 0 else None


@dataclass(frozen=True)
class Variant:
    """``words``: as the report calls it. ``load``: fields of LoadOrder that differ. ``share`` of the rollouts that it gets."""

    name: str
    words: str
    overrides: tuple[str, ...] = ()
    load: tuple[tuple[str, object], ...] = ()
    share: float = 1.0


@dataclass(frozen=True)
class Ablation:
    """``load`` and ``quick_load`` are for one node; rollouts and groups grow with the nodes. ``measures`` compare the first
    variant with each other one, ``own`` tell of each by itself. ``engine``: Hydra's words for it, where the series chooses
    none. ``set_up``: what was run, in words for the report.
    ``differs``: how the set-up differs from the paper's."""

    name: str
    question: str
    overrides: tuple[str, ...]
    load: LoadOrder
    quick_load: LoadOrder
    variants: tuple[Variant, ...]
    measures: tuple[Measure, ...]
    set_up: str
    differs: str
    own: tuple[Measure, ...] = ()
    time_minutes: int = 15
    engine: tuple[str, ...] = ("engine=scripted",)

    def order(self, variant: Variant, nodes: int, quick: bool) -> LoadOrder:
        load = self.quick_load if quick else self.load
        changed = msgspec.structs.replace(load, **dict[str, Any](variant.load))
        return msgspec.structs.replace(
            changed,
            rollouts=round(changed.rollouts * variant.share) * nodes,
            groups=changed.groups * nodes,
            max_parallel_groups=changed.max_parallel_groups * nodes,
        )
