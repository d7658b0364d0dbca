"""What the lists and views of runs say of each: read from its files, without failing on what is missing or half written."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.status import TrainerStatus
from prorl_hpc.observe.reading import read_tolerantly
from prorl_hpc.slurm.run_states import RunState

_TAIL_BYTES = 65536


@dataclass(frozen=True)
class RunRow:
    """One run in a table. ``step``/``steps``: done and wanted; None while the trainer has not said. ``overrides``: the
    words with which it was launched."""

    run: RunDirectory
    state: RunState
    step: int | None
    steps: int | None
    reward: float | None
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: RunDirectory, state: RunState) -> RunRow:
        trainer = _trainer_status(run, state.attempt)
        last = last_step(run)
        step = last.get("step") if trainer is None else trainer.step
        reward = last.get("reward") if trainer is None or trainer.reward is None else trainer.reward
        return cls(run, state, step, trainer.steps if trainer else None, reward, launched_with(run))

    @property
    def as_json(self) -> dict[str, Any]:
        """Stable keys; documented in prorl_hpc.cli.status."""
        job, report = self.state.job, self.state.report
        return {
            "id": self.run.run_id,
            "run": str(self.run.path),
            "status": self.state.word,
            "detail": self.state.detail,
            "job": job and job.record.job_id,
            "job_kind": job and job.record.kind,
            "job_state": self.state.job_state,
            "reason": report.reason if report else "",
            "start": report.start if report else "",
            "left_s": report.left_s if report else None,
            "submitted": job and job.record.submitted,
            "attempt": self.state.attempt,
            "step": self.step,
            "steps": self.steps,
            "reward": self.reward,
            "overrides": list(self.overrides),
        }


class _Environment(msgspec.Struct):
    overrides: list[str] = []


def launched_with(run: RunDirectory) -> tuple[str, ...]:
    """The overrides on the command line of ``launch``; of a sweep, those of this run."""
    record = read_tolerantly(run.path / "environment.json", _Environment)
    return tuple(record.overrides) if record is not None else ()


def differing(rows: Sequence[RunRow]) -> list[list[str]]:
    """Of each run the overrides that not all runs of its name have, in short: ``trainer.learning_rate=1e-5`` is
    ``learning_rate=1e-5`` where that is clear."""
    alike: dict[str, set[str]] = {}
    for row in rows:
        alike.setdefault(_name(row), set(row.overrides)).intersection_update(row.overrides)
    told = [[word for word in row.overrides if word not in alike[_name(row)]] for row in rows]
    keys = {word.partition("=")[0] for words in told for word in words}
    lasts = Counter(key.rpartition(".")[2] for key in keys)
    return [[_short(word, lasts) for word in words] for words in told]


def _name(row: RunRow) -> str:
    return row.run.run_id.rpartition("-")[0]


def _short(word: str, lasts: Counter[str]) -> str:
    key, equals, value = word.partition("=")
    last = key.rpartition(".")[2]
    return f"{last if lasts[last] == 1 else key}{equals}{value.rpartition('/')[2] or value}"


def last_step(run: RunDirectory) -> dict[str, Any]:
    """The newest step's record in metrics.jsonl, looked for in its last 64 KiB; empty if there is none."""
    try:
        with run.metrics_file.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError:  # the first of the tail, or one that is being written
            continue
        if isinstance(record, dict) and record.get("kind") == "step":
            return record
    return {}


def age(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h``, ``5 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def since_submission(state: RunState) -> str:
    return age(time.time() - state.job.record.submitted) if state.job else ""


def _trainer_status(run: RunDirectory, newest: int) -> TrainerStatus | None:
    """The newest attempt's, or that of the one before while it has none."""
    for attempt in (newest, newest - 1):
        if attempt < 1:
            break
        status = read_tolerantly(RunDirectory(run.path, attempt).trainer_status_file, TrainerStatus)
        if status is not None:
            return status
    return None
