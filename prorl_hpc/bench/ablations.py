"""The ablations of the seed's Table 3 and Figure 5 as points of a series, and what they come to.

An ablation changes one switch of the real code and nothing else; its first variant is ours. Every variant gets the same
rows, slots and engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from prorl_hpc.bench.ablation_parts import Ablation, Measure, Variant
from prorl_hpc.bench.ablation_table import ABLATIONS
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.scaling_figures import cautions, disturbances
from prorl_hpc.bench.scaling_records import PointFigures, PointResult, PointSpec, PointState
from prorl_hpc.bench.scaling_settings import WHOLE_TURNS
from prorl_hpc.bench.series_launch import last, last_of_each
from prorl_hpc.messages.errors import ConfigError


def chosen(names: Sequence[str]) -> list[Ablation]:
    """``all`` stands for every one. ConfigError, with the nearest name, for one that is none."""
    if list(names) == ["all"]:
        return list(ABLATIONS.values())
    for name in names:
        if name not in ABLATIONS:
            near = difflib.get_close_matches(name, ABLATIONS, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(f"ablate={name}: there is no such ablation. {hint}There are all, {', '.join(ABLATIONS)}")
    return [ABLATIONS[name] for name in dict.fromkeys(names)]


def ablation_points(
    names: Sequence[str], nodes: int, base: Sequence[str] = (), *, quick: bool = False
) -> list[PointSpec]:
    """The points of the ablations ``names`` at ``nodes``, ours first in each. ``base``: Hydra's words that hold for the
    whole series, over the ablation's own of workload, sizes and engine. ``quick``: fewer rollouts, so that
    a ratio tells less. ConfigError for an unknown name, and for a word that sets what an ablation switches."""
    ablations = chosen(names)
    for ablation in ablations:
        _check_switch(ablation, base)
    return [_point(ablation, variant, nodes, base, quick) for ablation in ablations for variant in ablation.variants]


def _check_switch(ablation: Ablation, base: Sequence[str]) -> None:
    """Raises ConfigError for a word of ``base`` that sets what the ablation switches."""
    switched = {word.partition("=")[0] for variant in ablation.variants for word in variant.overrides}
    for word in base:
        if word.partition("=")[0].lstrip("+") in switched:
            raise ConfigError(
                f"{word}: ablate={ablation.name} measures the values of this setting against each other: leave it out, or leave "
                f"{ablation.name} out of ablate="
            )


def _point(ablation: Ablation, variant: Variant, nodes: int, base: Sequence[str], quick: bool) -> PointSpec:
    words = last_of_each([*_own_words(ablation, base), *base, *variant.overrides])
    if last(words, "engine") != "scripted":
        words = [word for word in words if not word.lstrip("+").startswith("engine.script.")]
    return PointSpec(
        name=f"{ablation.name}-{variant.name}-{nodes}",
        nodes=nodes,
        overrides=words,
        load=ablation.order(variant, nodes, quick),
        series=ablation.name,
        variant=variant.name,
        time_minutes=ablation.time_minutes,
    )


def _own_words(ablation: Ablation, base: Sequence[str]) -> list[str]:
    """The ablation's, without those of the engine and its times that give way to what ``base`` chooses."""
    latency = last(base, "latency")
    if last(base, "engine") or last(base, "engine.kind"):
        engine: tuple[str, ...] = ()
    else:
        engine = ("engine=scripted",) if latency else ablation.engine
    return [*(word for word in ablation.overrides if not (latency and _is_time(word))), *engine]


def _is_time(word: str) -> bool:
    """Of the scripted engine: what a latency model says."""
    name = word.lstrip("+")
    return name.startswith("engine.script.") and name != WHOLE_TURNS


def ablation_figures(results: Sequence[PointResult]) -> list[Figure]:
    """For each ablation of which there is a point, and each number of nodes: ours against every other variant."""
    figures = []
    for ablation in ABLATIONS.values():
        mine = [result for result in results if result.spec.series == ablation.name]
        for nodes in sorted({result.spec.nodes for result in mine}):
            found = {result.spec.variant: result for result in mine if result.spec.nodes == nodes}
            figures += _of_ablation(ablation, found, nodes)
    return figures


def _of_ablation(ablation: Ablation, found: dict[str, PointResult], nodes: int) -> list[Figure]:
    where = "" if nodes == 1 else f", {nodes} nodes"
    ours, *others = ablation.variants
    figures = []
    for other in others:
        figures += [_gain(ablation, m, found, ours, other, where) for m in ablation.measures]
    for measure in ablation.own:
        figures += [_own(ablation, measure, found, variant, where) for variant in ablation.variants]
    return figures


def _gain(
    ablation: Ablation, measure: Measure, found: dict[str, PointResult], ours: Variant, other: Variant, where: str
) -> Figure:
    """How many times better ours is (measure.points: by how much)."""
    name, unit = f"{ablation.name}: {measure.name}{where}", measure.gain_unit
    goal = measure.goal if measure.against in ("", other.name) else None
    wanted = "" if goal is None else f"{'>' if measure.strictly else '>='} {goal:g}"
    values = []
    for variant in (ours, other):
        value, why = _value(measure, found.get(variant.name))
        if value is None:
            return Figure.not_taken(name, unit, other.words, wanted, f"{variant.words}: {why}")
        values.append(value)
    gain = measure.gain(*values)
    if gain is None:
        return Figure.not_taken(name, unit, other.words, wanted, f"{values[0]:g} and {values[1]:g} have no ratio")
    detail = (
        f"{_told(measure, found[ours.name], ours, values[0])}, {_told(measure, found[other.name], other, values[1])}"
        f"{'' if gain or not measure.points else ', no difference'}. {ablation.set_up}. Engine: {found[ours.name].engine}."
        + (f" The paper: {measure.paper}" if measure.paper and measure.against in ("", other.name) else "")
    )
    for variant in (ours, other):
        of_point = cautions if measure.rate else disturbances
        detail += "".join(f" Mind {variant.words}: {words}." for words in of_point(found[variant.name]))
    if goal is None:
        return Figure.told(name, gain, unit, other.words, detail)
    judged = Figure.above if measure.strictly else Figure.at_least
    return judged(name, gain, goal, unit, other.words, detail)


def _told(measure: Measure, result: PointResult, variant: Variant, value: float) -> str:
    return f"{variant.words} {measure.words(value)}{measure.spread(result.figures) if result.figures else ''}"


def _own(ablation: Ablation, measure: Measure, found: dict[str, PointResult], variant: Variant, where: str) -> Figure:
    """A value of one variant by itself, of which less is better; ours has the goal."""
    goal = measure.goal if variant is ablation.variants[0] else None
    wanted = "" if goal is None else f"<= {goal:.3g}"
    name = f"{ablation.name}: {measure.name}{where}, {variant.words}"
    value, why = _value(measure, found.get(variant.name))
    if value is None:
        return Figure.not_taken(name, measure.unit, "", wanted, why)
    if goal is None:
        return Figure.told(name, value, measure.unit, "", measure.paper)
    return Figure.at_most(name, value, goal, measure.unit, "the goal", measure.paper)


def _value(measure: Measure, result: PointResult | None) -> tuple[float | None, str]:
    """And why there is none."""
    if result is None:
        return None, "not measured: the series was interrupted, the same command goes on with it"
    figures: PointFigures | None = result.figures
    if result.state is not PointState.DONE or figures is None:
        return None, f"{result.state.value.replace('_', ' ')}: {result.why or 'no reason was recorded'}"
    value = measure.of(figures)
    return (None, measure.absent) if value is None else (value, "")
