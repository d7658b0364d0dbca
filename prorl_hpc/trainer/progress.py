"""What people see of training while it runs: the phase it is in, the seconds of each, the pace, the newest numbers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.status import TrainerStatus
from prorl_hpc.observe.metrics import newest_per_step
from prorl_hpc.trainer.metric_writers import MetricWriters

log = logging.getLogger(__name__)
_STEPS_FOR_A_PACE = 2


class TrainingProgress:
    """``step``: the last one that is done, of ``steps``; kept up to date by the loop."""

    def __init__(self, run: RunDirectory, writers: MetricWriters, step: int, steps: int) -> None:
        self._status_file, self._writers = run.trainer_status_file, writers
        self.step, self._steps = step, steps
        self.seconds: dict[str, float] = {}
        """By phase, since ``begin``."""
        self._begun = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=5)
        """Of whole steps of this attempt: the pace."""
        self._last: dict[str, Any] = {}
        evaluations = newest_per_step(writers.log.read(), "eval")
        self._evaluated = {int(record["step"]): record for record in evaluations}

    def is_evaluated(self, step: int) -> bool:
        return step in self._evaluated

    def begin(self) -> None:
        """A step, or an evaluation: its seconds are counted from here."""
        self.seconds, self._begun = {}, time.monotonic()

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        self.say(name, detail)
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def line(self, record: dict[str, Any]) -> dict[str, Any]:
        """``record`` of the step as far as it has come, with its times: a line of metrics.jsonl."""
        total = time.monotonic() - self._begun
        seconds = self.seconds | {"total": total}
        idle = seconds.get("rollouts", 0.0) / max(total, 1e-9)
        whole = record | {"time": time.time(), "seconds": seconds, "idle_fraction": idle}
        return {key: value for key, value in whole.items() if value is not None}

    def write_step(self, line: dict[str, Any], *, sets_pace: bool) -> None:
        """``sets_pace``: its time says how long steps take."""
        if sets_pace:
            self._step_seconds.append(line["seconds"]["total"])
        self._last = line
        self._writers.write(line)

    def make_up(self, line: dict[str, Any] | None) -> None:
        """Write the line that the checkpoint holds, if who saved it was killed before it wrote the line itself."""
        if line is None:
            return
        written = [
            one for one in self._writers.log.read() if (one.get("kind"), one.get("step")) == ("step", line["step"])
        ]
        if not any(one.get("time", 0.0) >= line["time"] for one in written):
            self.write_step(line, sets_pace=False)

    def write_evaluation(self, record: dict[str, Any]) -> None:
        self._evaluated[record["step"]] = record
        self._writers.write({"kind": "eval", "time": time.time(), "seconds": self.seconds["evaluating"]} | record)

    def say(self, phase: str, detail: str = "") -> None:
        """Write the trainer's status; training does not end because that is refused."""
        first, last = self._evaluated.get(0, {}), self._evaluated[max(self._evaluated)] if self._evaluated else {}
        comparable = first.get("held_out") == last.get("held_out")
        status = TrainerStatus(
            phase=phase,
            step=self.step,
            steps=self._steps,
            time=time.time(),
            reward=self._last.get("reward"),
            heldout_start=first.get("reward") if comparable else None,
            heldout_last=last.get("reward"),
            eta_s=self._eta_s(),
            detail=detail,
            last_metrics=self._last,
        )
        try:
            write_json(self._status_file, status)
        except OSError as error:
            log.warning("%s cannot be written, and what is shown of training is old: %s", self._status_file, error)

    def _eta_s(self) -> float | None:
        if len(self._step_seconds) < _STEPS_FOR_A_PACE:
            return None
        return (self._steps - self.step) * sum(self._step_seconds) / len(self._step_seconds)
