"""From the words of ``bench scaling`` to the points of a series.

More nodes get more rollouts in proportion (weak scaling), so that every point has the same work per node.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from prorl_hpc.bench.scaling_records import LoadOrder, PointSpec
from prorl_hpc.bench.scaling_settings import SETTINGS, WHOLE_TURNS
from prorl_hpc.bench.series_launch import WORDS, last, last_of_each
from prorl_hpc.cli.composition import compose_all
from prorl_hpc.cli.composition_choices import groups as group_names
from prorl_hpc.cli.composition_choices import how_to_make
from prorl_hpc.cli.launch_help import group_choices
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import ConfigError

PER_SLOT = 12
"""Rollouts for each RUN slot: those that run when the orders are used up are then fewer than the tenth that does not count."""
ONE_MACHINE = ("rollout.init_slots=2", "rollout.ready_slots=4", "rollout.run_slots=2", "rollout.eval_slots=16")
"""Slots of a node where all nodes share one machine: more would measure its cores. RUN is what all of them wait for."""
ENGINE = ("engine.script.first_token_s=0.06", "engine.script.token_s=0.01")
"""Times of the scripted engine where neither latency= nor engine.script. says others: chosen, not fitted."""
LEAST = 128
"""Rollouts of a point: those of few nodes get their rows so often, for chance in them would be in every efficiency."""
QUICK_ROWS = 48
"""Rollouts of a node of this machine with --quick: two minutes, and a rate that is known to some five percent; 40 were too few to tell 0.95."""
MOST_NODES = 4096
MOST_ROLLOUTS_PER_NODE, MOST_ROLLOUTS = 1_000_000, 10_000_000
"""Of a node, which are as many dataset rows, and of a point: all are ordered at once."""
_NODES = (1, 2, 4, 8)
_DIGITS = 12
"""A number that is written with more is above every limit here."""
_OWN = {
    "run.name": "the points are named by the series: leave it out",
    "run.root": "the runs go into the folder of the series: out=DIR",
    "cluster.time_minutes": "the time limit of a point is minutes=",
    "cluster.requeue": "points are not requeued: leave it out",
    "cluster.rollout.nodes": "the sizes of the points are nodes=",
    "cluster.inference.nodes": "the sizes of the points are nodes=",
}
"""Settings that a series sets itself, and what is given in their place."""


class Asked(msgspec.Struct, frozen=True):
    """``overrides``: Hydra's words. ``rollouts`` is per node, 0: by the workload's slots; ``minutes``: of each point."""

    nodes: list[int]
    workload: str
    ablate: list[str]
    rollouts: int
    minutes: int
    at_once: int
    recorded: str
    out: str
    overrides: list[str]


def read_words(words: Sequence[str]) -> Asked:
    """Raises ConfigError for a word that is neither a setting of ours nor one for Hydra, and for values that cannot be."""
    given: dict[str, str] = {}
    overrides: list[str] = []
    groups: dict[str, dict[str, Path]] = {name: {} for name in group_names()} | group_choices()
    for word in words:
        name, equals, value = word.partition("=")
        bare = name.lstrip("+~")
        if name in SETTINGS and equals:
            if not value:
                raise ConfigError(f"{word} is empty: give {name} a value, or leave it out")
            if name in given:
                raise ConfigError(f"{name}={given[name]} and {word}: it is given twice, leave one of them out")
            given[name] = value
        elif bare in _OWN:
            raise ConfigError(f"{word}: {_OWN[bare]}")
        elif bare == "bench":
            raise ConfigError(f"{word}: the workload is chosen by workload={value or 'NAME'}")
        elif equals and ("." in bare or bare in groups):
            overrides.append(word)
        else:
            raise ConfigError(_unknown(word, [*SETTINGS, *groups]))
    workload = given.get("workload", "recorded" if "recorded" in given else "mixed")
    ablate = _names("ablate", given["ablate"]) if "ablate" in given else []
    nodes = whole_numbers("nodes", given["nodes"]) if "nodes" in given else [] if ablate else [*_NODES]
    _check_workload(workload, given.get("recorded", ""), groups.get("bench", {}))
    if not nodes:
        _check_alone(given)
    return Asked(
        nodes,
        workload,
        ablate,
        _whole("rollouts", given["rollouts"], 1, MOST_ROLLOUTS_PER_NODE) if "rollouts" in given else 0,
        _whole("minutes", given.get("minutes", "30"), 1),
        _whole("at_once", given.get("at_once", "1"), 1),
        str(Path(given["recorded"]).expanduser().absolute()) if given.get("recorded") else "",
        given.get("out", ""),
        overrides,
    )


def points_of(asked: Asked, place: str, *, quick: bool = False) -> list[PointSpec]:
    """``quick``: few rollouts, and ablations in their small sizes. Raises ConfigError for an ablation that is not known, or what Hydra cannot compose."""
    base = list(asked.overrides)
    if not last(base, "engine") and not last(base, "engine.kind"):
        base = ["engine=scripted", *base]
    points = _node_points(asked, base, place, quick) if asked.nodes else []
    if asked.ablate:
        from prorl_hpc.bench.ablations import ablation_points

        points += ablation_points(asked.ablate, min(asked.nodes, default=1), asked.overrides, quick=quick)
    return points


def _node_points(asked: Asked, base: list[str], place: str, quick: bool) -> list[PointSpec]:
    sizes = [] if place == "slurm" else [*ONE_MACHINE]
    words = last_of_each([f"bench={asked.workload}", *sizes, *_engine(base), *base])
    if asked.recorded:
        words.append(f"task.options.recorded={asked.recorded}")
    (composed,) = compose_all(last_of_each([*WORDS, *words]))
    few = quick and place != "slurm"
    per_node = asked.rollouts or (QUICK_ROWS if few else rollouts_per_node(composed.config))
    if (most := per_node * max(asked.nodes)) > MOST_ROLLOUTS:
        raise ConfigError(
            f"nodes={max(asked.nodes)} with {per_node:,} rollouts for each node are {most:,} rollouts of one point, and at "
            f"most {MOST_ROLLOUTS:,} can be: fewer nodes=, or rollouts={MOST_ROLLOUTS // max(asked.nodes)} at most"
        )
    words = last_of_each([f"task.train.size={per_node}", *words])  # N nodes get the very work of one node N times
    return [
        PointSpec(
            f"nodes-{n}",
            n,
            words,
            _load(per_node * n, 0 if asked.rollouts or few else LEAST),
            time_minutes=asked.minutes,
        )
        for n in asked.nodes
    ]


def _load(rollouts: int, least: int) -> LoadOrder:
    """All rows equally often."""
    return LoadOrder(rollouts=rollouts * max(1, math.ceil(least / rollouts)))


def _engine(words: list[str]) -> list[str]:
    scripted = "scripted" in (last(words, "engine"), last(words, "engine.kind"))
    timed = any(word.lstrip("+").startswith(("latency=", "engine.script.", "engine.script=")) for word in words)
    whole = any(word.lstrip("+").startswith("engine.script.reply_") for word in words)
    return [*([] if timed or not scripted else ENGINE), *([] if whole or not scripted else [WHOLE_TURNS])]


def rollouts_per_node(config: ProrlConfig) -> int:
    """PER_SLOT or more for each RUN slot, and all rows equally often: then every point has the same work per node."""
    rows = config.task.train.size
    wanted = PER_SLOT * config.rollout.run_slots * config.rollout.workers_per_node
    return math.ceil(wanted / rows) * rows


def whole_numbers(name: str, value: str) -> list[int]:
    """``1,2,4,8`` in rising order. Raises ConfigError."""
    words = value.split(",")
    if "" in words:
        raise ConfigError(f"{name}={value}: expected whole numbers with a comma between them, such as {name}=1,2,4,8")
    numbers = [_whole(name, word, 1) for word in words]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{name}={value}: a number stands there twice")
    if max(numbers) > MOST_NODES:
        raise ConfigError(f"{name}={value}: at most {MOST_NODES} nodes can be asked for")
    return sorted(numbers)


def _whole(name: str, value: str, least: int, most: int = 10_000_000) -> int:
    if not (value.isascii() and value.isdecimal()) or int(value[:_DIGITS]) < least:
        raise ConfigError(f"{name}={value}: expected a whole number, {least} or more")
    if len(value) > _DIGITS or int(value) > most:
        raise ConfigError(f"{name}={value}: must be at most {most:,}")
    return int(value)


def _names(name: str, value: str) -> list[str]:
    names = value.split(",")
    if not all(names):
        raise ConfigError(f"{name}={value}: a name between the commas is empty")
    if len(set(names)) < len(names):
        raise ConfigError(f"{name}={value}: a name stands there twice")
    if "all" in names and len(names) > 1:
        raise ConfigError(f"{name}={value}: all are all of them, name them alone or leave all out")
    return names


def _check_alone(given: dict[str, str]) -> None:
    """Raises ConfigError for words that are about the points of nodes=, where ablations alone are measured."""
    for name in ("workload", "recorded", "rollouts", "minutes"):
        if name in given:
            raise ConfigError(
                f"{name}={given[name]} is for the points of nodes=, and ablate={given['ablate']} alone is measured: an ablation "
                f"has a workload, sizes and a time limit of its own, without which its switch would tell nothing. Leave {name}= "
                "out, or give nodes= too"
            )


def _check_workload(workload: str, recorded: str, choices: Iterable[str]) -> None:
    if workload not in set(choices):
        raise ConfigError(f"{_unknown(f'workload={workload}', choices, workload)}; {how_to_make('bench')}")
    if workload != "recorded" and recorded:
        raise ConfigError(
            f"recorded={recorded} needs workload=recorded, and workload={workload} is given: leave one out"
        )
    if workload == "recorded" and not recorded:
        raise ConfigError(
            "workload=recorded needs recorded=DIR: the directory of the run whose stage times are replayed"
        )
    if recorded and not (Path(recorded).expanduser() / "config.yaml").is_file():
        raise ConfigError(
            f"recorded={recorded}: there is no run there (no config.yaml in it): give the directory of a run, such as "
            "runs/latest; `prorl-hpc status` lists yours"
        )


def _unknown(word: str, names: Iterable[str], given: str = "") -> str:
    names = list(names)
    given_name = given or word.partition("=")[0]
    near = difflib.get_close_matches(given_name, names, n=1) or [n for n in names if n.startswith(given_name)]
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{word} is not known here: {hint}There are {', '.join(names)}" + (
        "" if given else ", and settings as for launch (rollout.run_slots=8)"
    )
