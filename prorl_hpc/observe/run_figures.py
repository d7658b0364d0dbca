"""The numbers of a run's report, from what its processes left."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.status import PolicyStatus, RunStatus
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.observe.reading import read_tolerantly
from prorl_hpc.observe.rollout_store import read_rollouts

Record = dict[str, Any]
_BREAKAGES = 5
_MESSAGE_CHARS = 200


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a success rate (Wilson 1927, doi:10.1080/01621459.1927.10502953); (0, 1) of no trials."""
    if trials <= 0:
        return 0.0, 1.0
    rate = successes / trials
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At the ends the bounds are exactly 0 and 1; rounding would leave them a hair beside.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)


@dataclass(frozen=True)
class Breakage:
    """Rollouts that broke in the same way."""

    count: int
    stage: str
    kind: str
    message: str
    """Its first line, numbers as in the first such rollout."""


@dataclass(frozen=True)
class RunFigures:
    """All of it may be empty: a run can fail before its first step."""

    steps: list[Record]
    evals: list[Record]
    status_counts: dict[str, int]
    """Rollouts by status, evaluations too."""
    failures: dict[str, int]
    """Broken rollouts by kind."""
    breakages: list[Breakage]
    """The commonest ones, most first; empty where trajectories are not kept."""
    checkpoints: list[Path]
    """Loadable ones, oldest first."""
    bad_agent_exits: int = 0
    """Rollouts whose outside agent ended with an exit code other than 0."""
    policies: list[PolicyStatus] = field(default_factory=list)
    """What the rollouts of each came to, as the rollout service said last."""

    @classmethod
    def of(cls, run: RunDirectory) -> RunFigures:
        records = MetricsLog(run.metrics_file).read()
        steps = newest_per_step(records, "step")
        table = _read_outcomes(run)
        failures = Counter(kind for kind in table["failure_kind"].to_pylist() if kind is not None)
        if not table.num_rows:  # trajectories are not kept
            for step in steps:
                failures.update({k: int(n) for k, n in (step.get("failures") or {}).items()})
        return cls(
            steps=steps,
            evals=newest_per_step(records, "eval"),
            status_counts=dict(Counter(table["status"].to_pylist())),
            failures=dict(failures),
            breakages=_breakages(table),
            checkpoints=loadable_checkpoints(run),
            bad_agent_exits=sum(
                bool(dict(metrics or ()).get("agent_exit_code")) for metrics in table["metrics"].to_pylist()
            ),
            policies=status.policies if (status := read_tolerantly(run.status_file, RunStatus)) is not None else [],
        )

    def total(self, key: str) -> float | None:
        """Sum of a count over all steps; None if no step has it."""
        values = [record[key] for record in self.steps if _is_number(record.get(key))]
        return sum(values) if values else None

    def largest(self, key: str) -> float | None:
        return max((record[key] for record in self.steps if _is_number(record.get(key))), default=None)

    def mean(self, key: str) -> float | None:
        values = [record[key] for record in self.steps if _is_number(record.get(key))]
        return sum(values) / len(values) if values else None

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds over all steps, by phase, ``total`` left out; the longest first."""
        sums: Counter[str] = Counter()
        for record in self.steps:
            phases = record.get("seconds")
            if isinstance(phases, dict):
                sums.update({k: v for k, v in phases.items() if k != "total" and _is_number(v)})
        return dict(sums.most_common())

    @property
    def evaluation_seconds(self) -> float:
        """Of all evaluations, which are no part of any step."""
        return float(sum(record["seconds"] for record in self.evals if _is_number(record.get("seconds"))))

    @property
    def idle_fraction(self) -> float | None:
        """Share of the steps' time in which the trainer waited for rollouts."""
        timed = [r["seconds"] for r in self.steps if isinstance(r.get("seconds"), dict)]
        whole = sum(s["total"] for s in timed if _is_number(s.get("total")))
        return sum(s["rollouts"] for s in timed if _is_number(s.get("rollouts"))) / whole if whole else None

    def training_rate(self, key: str) -> float | None:
        """A total per second of training."""
        amount, seconds = self.total(key), self.seconds_by_phase.get("training")
        return amount / seconds if amount is not None and seconds else None

    def rate(self, key: str) -> float | None:
        """A total per second in which batches were being made; they may be made while the trainer learns."""
        amount, seconds = self.total(key), self.total("generation_s") or self.seconds_by_phase.get("rollouts")
        return amount / seconds if amount is not None and seconds else None


def loadable_checkpoints(run: RunDirectory) -> list[Path]:
    """``checkpoints/step-N`` that hold a Hugging Face model, by rising N."""
    found = []
    if run.checkpoints.is_dir():
        for path in run.checkpoints.iterdir():
            match = re.fullmatch(r"step-(\d+)", path.name)
            if match and (path / "config.json").is_file():
                found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def _read_outcomes(run: RunDirectory) -> pa.Table:
    return read_rollouts(run, columns=["status", "failure_stage", "failure_kind", "failure_message", "metrics"])


def _breakages(outcomes: pa.Table) -> list[Breakage]:
    """Messages that differ in numbers alone (ids, ports, times) count as one."""
    counts: Counter[tuple[str, str, str]] = Counter()
    firsts: dict[tuple[str, str, str], str] = {}
    columns = (outcomes[name].to_pylist() for name in ("failure_stage", "failure_kind", "failure_message"))
    for stage, kind, message in zip(*columns, strict=True):
        if kind is not None:
            line = next(iter((message or "").splitlines()), "")[:_MESSAGE_CHARS]
            alike = (stage or "", kind, re.sub(r"\d+", "0", line))
            counts[alike] += 1
            firsts.setdefault(alike, line)
    return [Breakage(count, key[0], key[1], firsts[key]) for key, count in counts.most_common(_BREAKAGES)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
