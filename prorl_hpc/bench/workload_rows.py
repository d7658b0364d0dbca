"""The rows of a workload: what each rollout is to take, drawn from distributions or taken from a recorded run."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from prorl_hpc.bench.simulation_times import Distribution, parse_distribution
from prorl_hpc.messages.errors import ConfigError

Seconds = Annotated[float, Meta(ge=0, le=86400)]
Count = Annotated[int, Meta(ge=0, le=10_000_000)]


class WorkloadTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An assistant turn of ``tokens``, then a tool call of ``tool_s`` seconds."""

    tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    tool_s: Seconds = 0.0


class WorkloadRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One prompt. ``uniform``: all of its group get the same reward. ``spread``: sigma of a log-normal factor, drawn for
    each sample of the group, on the seconds of its tool calls and its evaluation. ``run_s``: RUN lasts at least so long; its
    tool calls sleep what the turns leave of it."""

    id: str
    kind: str
    turns: Annotated[list[WorkloadTurn], Meta(min_length=1)]
    init_s: Seconds = 0.0
    prompt_tokens: Count = 0
    observation_chars: Count = 0
    eval_s: Seconds = 0.0
    uniform: bool = False
    spread: Annotated[float, Meta(ge=0, le=5)] = 0.0
    run_s: Seconds = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> WorkloadRow:
        """ValueError naming the field if it is none."""
        try:
            return msgspec.convert(row, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a row of a workload: {error}") from error

    def factor(self, sample: int) -> float:
        """Of a sample's seconds: the same at every time, another for every sample."""
        if not self.spread:
            return 1.0
        seed = zlib.crc32(f"{self.id} {sample}".encode())
        return float(np.random.default_rng(seed).lognormal(0.0, self.spread))


_DRAWN = ("init_s", "turns", "turn_tokens", "tool_s", "prompt_tokens", "observation_chars", "eval_s")
_NUMBERS = {"weight": 1.0, "uniform_share": 0.0, "spread": 0.0}
KIND_SETTINGS = (*_NUMBERS, *_DRAWN)


class Kind:
    """One kind of rollout, as ``task.options.kinds.NAME`` describes it. Raises ConfigError."""

    def __init__(self, name: str, options: Any) -> None:
        setting = f"task.options.kinds.{name}"
        if not isinstance(options, Mapping):
            raise ConfigError(f"{setting}={options}: expected settings of it: {', '.join(KIND_SETTINGS)}")
        if unknown := sorted(set(options) - set(KIND_SETTINGS)):
            raise ConfigError(f"{setting}.{unknown[0]}: there is no such setting; known are {', '.join(KIND_SETTINGS)}")
        self.name = name
        numbers = {
            number: _number(options.get(number, default), f"{setting}.{number}") for number, default in _NUMBERS.items()
        }
        self.weight, self.uniform_share, self.spread = numbers.values()
        if self.uniform_share > 1:
            raise ConfigError(f"{setting}.uniform_share={self.uniform_share:g}: must be a share, from 0 to 1")
        self._drawn: dict[str, Distribution] = {
            field: parse_distribution(str(options.get(field, "constant:0")), f"{setting}.{field}") for field in _DRAWN
        }

    def row(self, row_id: str, rng: np.random.Generator, *, uniform: bool) -> WorkloadRow:
        drawn = {
            field: float(self._drawn[field].draw(rng, 1)[0])
            for field in _DRAWN
            if field not in ("turn_tokens", "tool_s")
        }
        turns = max(1, round(drawn["turns"]))
        tokens, tool_s = (self._drawn[field].draw(rng, turns) for field in ("turn_tokens", "tool_s"))
        return WorkloadRow(
            row_id,
            self.name,
            [WorkloadTurn(max(1, round(n)), round(float(s), 4)) for n, s in zip(tokens, tool_s, strict=True)],
            round(drawn["init_s"], 4),
            round(drawn["prompt_tokens"]),
            round(drawn["observation_chars"]),
            round(drawn["eval_s"], 4),
            uniform,
            self.spread,
        )


def read_kinds(options: Any) -> list[Kind]:
    """``task.options.kinds``. Raises ConfigError."""
    if not isinstance(options, Mapping) or not options:
        raise ConfigError(
            "task.options.kinds: a workload needs at least one kind of rollout: choose bench=swe-like, bench=math-like, "
            "bench=mixed or bench=recorded, or describe one as conf/bench/swe-like.yaml does"
        )
    kinds = [Kind(str(name), kind) for name, kind in options.items()]
    if not any(kind.weight for kind in kinds):
        raise ConfigError("task.options.kinds: their weights are all 0, at least one must be above")
    return kinds


def draw_rows(kinds: list[Kind], size: int, seed: int, prefix: str) -> Iterator[WorkloadRow]:
    """The first n of them are the same for every ``size``. Kinds, and within a kind the uniform ones, come in turn by their
    shares and not by chance: a few dozen rows have the mixture that was asked for."""
    rng = np.random.default_rng([zlib.crc32(prefix.encode()), seed])
    due = [0.0] * len(kinds)
    uniform_due = [0.0] * len(kinds)
    total = sum(kind.weight for kind in kinds)
    for number in range(size):
        due = [owed + kind.weight / total for owed, kind in zip(due, kinds, strict=True)]
        chosen = max(range(len(kinds)), key=due.__getitem__)
        due[chosen] -= 1
        kind = kinds[chosen]
        uniform_due[chosen] += kind.uniform_share
        uniform = uniform_due[chosen] >= 1 - 1e-9
        uniform_due[chosen] -= uniform
        yield kind.row(f"{prefix}-{seed}-{number}", rng, uniform=uniform)


def _number(given: Any, setting: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1e6:
        raise ConfigError(f"{setting}={given}: must be a number, 0 or more")
    return float(given)
