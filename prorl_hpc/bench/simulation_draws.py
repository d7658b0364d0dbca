"""What chance decides, by rollout: the same rollout has the same fate under every policy (common random numbers).

Rollouts are drawn in blocks, by stream (a batch is a stream of its own) and place in the stream, so that what
one policy starts in addition shifts nothing for the others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np

from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_times import Distribution, Floats, parse_distribution
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import Stage

_BLOCK = 8192
STAGES = tuple(Stage)

Fault = tuple[int, float]
"""The stage (0 to 2) that breaks, and after which share of its time; stage -1: none does."""
NO_FAULT: Fault = (-1, 1.0)

Fate = tuple[float, float, float, int, float]
"""Seconds of INIT, RUN and EVAL, and the Fault of the first attempt."""


class Draws:
    """Random numbers of one simulation. Reads the recorded run, if there is one; raises ConfigError. ``times``: nothing is
    drawn, the rollouts take these seconds of INIT, RUN and EVAL, shape (rollouts, 3), one after the other, and from the
    start again when all are used up."""

    def __init__(self, config: SimulationConfig, times: Floats | None = None) -> None:
        self._config = config
        self._seed = config.seed
        self._faults = (config.init_failures, config.run_failures, config.eval_failures)
        self._recorded = recorded_times(config.recorded) if config.recorded else None
        self._replayed = times
        kinds = list(config.workloads.values())
        weights = np.array([kind.weight for kind in kinds] or [1.0])
        self._shares = np.cumsum(weights / weights.sum())[:-1]
        self._times: list[list[Distribution]] = []
        for name in ("init", "run", "eval"):
            default: str = getattr(config, name)
            texts: list[str] = [getattr(kind, name) or default for kind in kinds] or [default]
            self._times.append([parse_distribution(text, name) for text in texts])

    def fates(self, stream: int) -> Iterator[Fate]:
        """The rollouts of a stream, one after the other, without end."""
        for block in itertools.count():
            rng = np.random.default_rng((self._seed, 0, stream, block))
            init, run, evaluation = self._stage_times(rng, stream, block)
            if self._config.straggler_share:
                slow = rng.random(_BLOCK) < self._config.straggler_share
                run = np.where(slow, run * self._config.straggler_factor, run)
            if any(self._faults):
                stages, shares = self._first_faults(rng)
                yield from zip(init.tolist(), run.tolist(), evaluation.tolist(), stages, shares, strict=True)
            else:
                none = itertools.repeat(NO_FAULT[0]), itertools.repeat(NO_FAULT[1])
                yield from zip(init.tolist(), run.tolist(), evaluation.tolist(), *none, strict=False)

    @property
    def mean_stage_s(self) -> float:
        """Of the first rollouts."""
        return float(np.mean([fate[:3] for fate in itertools.islice(self.fates(0), 500)]))

    def uniform_groups(self, stream: int) -> Iterator[bool]:
        """Whether all rewards of a group are equal, group after group of a stream."""
        for block in itertools.count():
            rng = np.random.default_rng((self._seed, 1, stream, block))
            yield from (rng.random(_BLOCK) < self._config.uniform_share).tolist()

    def arrivals(self) -> Iterator[float]:
        """Seconds between arrivals."""
        distribution = parse_distribution(self._config.arrivals, "arrivals")
        for block in itertools.count():
            yield from distribution.draw(np.random.default_rng((self._seed, 2, block)), _BLOCK).tolist()

    def up_times(self, kind: int, number: int, mtbf_s: float) -> Iterator[float]:
        """Seconds that machine ``number`` of a ``kind`` lives, time after time."""
        rng = random.Random(f"{self._seed} {kind} {number}")
        while True:
            yield rng.expovariate(1.0 / mtbf_s)

    def fault(self, attempt_id: str) -> Fault:
        """Of an attempt after the first."""
        rng = random.Random(f"{self._seed} {attempt_id}")
        for stage, probability in enumerate(self._faults):
            if rng.random() < probability:
                return stage, rng.random()
        return NO_FAULT

    def _stage_times(self, rng: np.random.Generator, stream: int, block: int) -> list[Floats]:
        if self._replayed is not None:
            first = stream * self._config.groups_per_batch * self._config.group_size + block * _BLOCK
            rows = self._replayed[(first + np.arange(_BLOCK)) % len(self._replayed)]
            return [rows[:, 0], rows[:, 1], rows[:, 2]]
        if self._recorded is not None:
            rows = self._recorded[rng.integers(len(self._recorded), size=_BLOCK)]
            return [rows[:, 0], rows[:, 1], rows[:, 2]]
        if not len(self._shares):
            return [kinds[0].draw(rng, _BLOCK) for kinds in self._times]
        which = np.searchsorted(self._shares, rng.random(_BLOCK), side="right")
        return [np.choose(which, [kind.draw(rng, _BLOCK) for kind in kinds]) for kinds in self._times]

    def _first_faults(self, rng: np.random.Generator) -> tuple[list[int], list[float]]:
        broken = rng.random((len(STAGES), _BLOCK)) < np.array(self._faults)[:, None]
        stages = np.where(broken.any(axis=0), broken.argmax(axis=0), NO_FAULT[0])
        return stages.tolist(), rng.random(_BLOCK).tolist()


def recorded_times(run_dir: str) -> Floats:
    """Seconds in INIT, RUN and EVAL of a run's finished rollouts, shape (rollouts, 3). Raises ConfigError."""
    from prorl_hpc.observe.rollout_store import read_rollouts

    run = RunDirectory(run_dir)
    try:
        table = read_rollouts(run, columns=["status", "timings"])
    except (OSError, ValueError) as error:
        raise ConfigError(f"recorded={run_dir}: its rollouts cannot be read: {error}") from error
    rows = []
    for status, timings in zip(table["status"].to_pylist(), table["timings"].to_pylist(), strict=True):
        spent = {timing["stage"]: timing["busy_s"] for timing in timings or ()}
        if status == "done" and all(stage.value in spent for stage in STAGES):
            rows.append([spent[stage.value] for stage in STAGES])
    if not rows:
        raise ConfigError(
            f"recorded={run_dir}: there is no finished rollout in {run.rollouts}: name the directory of a run that "
            "keeps its trajectories (rollout.keep_trajectories=true)"
        )
    return np.array(rows, dtype=np.float64)
