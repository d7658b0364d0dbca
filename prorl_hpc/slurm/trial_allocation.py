"""A small allocation for a trial: one node of each component of a plan, for a few minutes, through one `srun`.

`srun` outside of an allocation makes the (heterogeneous) job itself, runs one task on each node and ends the job with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prorl_hpc.config.schema import ClusterConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.environment import submission_unset
from prorl_hpc.slurm.script import Component, setup_lines
from prorl_hpc.slurm.site_records import expand_hosts

_LEFT_OUT = (
    "nodes",
    "ntasks-per-node",
    "time",
    "exclusive",
    "no-kill",
    "dependency",
    "begin",
    "mail-type",
    "mail-user",
)
_SMALL_CPUS = 2
_SMALL_MIB = 2048
_CANCEL_S = 15.0
_LOOK_S = 0.5


@dataclass(frozen=True)
class TrialState:
    """What squeue says of the trial's job. ``nodes``: by place of the component, as far as they are given."""

    job_id: str = ""
    state: str = ""
    reason: str = ""
    nodes: dict[int, str] = field(default_factory=dict)


class TrialAllocation:
    """One per trial; ``start``, ``wait``, and in any case ``end``. ``commands``: component → what its node runs."""

    def __init__(
        self,
        cluster: ClusterConfig,
        parts: Sequence[Component],
        commands: dict[str, list[str]],
        log: Path,
        minutes: int,
    ) -> None:
        self._name = f"prorl-doctor-{secrets.token_hex(4)}"
        self.words = srun_words(self._name, cluster, parts, commands, minutes)
        self.last = TrialState()
        self._log = log
        self._srun: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Ask for the job. Raises RunError if there is no srun."""
        unset = set(submission_unset(os.environ))
        environ = {key: value for key, value in os.environ.items() if key not in unset}
        with self._log.open("wb") as log:
            try:
                self._srun = subprocess.Popen(
                    self.words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            except FileNotFoundError:
                raise RunError("srun is not on PATH: run this on a login node of the cluster") from None

    def wait(self, queue_s: float, work_s: float, tell: Callable[[str], None]) -> str:
        """Until all tasks have ended. At most ``queue_s`` in the queue and ``work_s`` at work; returns what went wrong,
        or nothing. ``tell`` hears of each change."""
        assert self._srun is not None
        began, started, told = time.monotonic(), 0.0, ""
        while self._srun.poll() is None:
            now, self.last = time.monotonic(), self._look() or self.last
            if not started and self.last.state in ("RUNNING", "COMPLETING"):
                started = now
            words = f"job {self.last.job_id or '(no number yet)'} {self.last.state.lower() or 'is being submitted'}"
            words += f" ({self.last.reason})" if self.last.reason and not started else ""
            if words != told:
                tell(words)
                told = words
            if not started and now - began > queue_s:
                return f"{words} after {queue_s:.0f} s in the queue"
            if started and now - started > work_s:
                return f"its nodes were not done after {work_s:.0f} s"
            time.sleep(_LOOK_S)
        if not self.last.nodes:  # it was over between two looks
            self.last = self._look("--states=all") or self.last
        return "" if self._srun.returncode == 0 else f"srun ended with exit code {self._srun.returncode}"

    def end(self) -> None:
        """End the job if it is not over; harmless at any time."""
        if self._srun is None or self._srun.poll() is not None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # then the job's time limit ends it
            subprocess.run(["scancel", "--name", self._name], capture_output=True, timeout=_CANCEL_S)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._srun.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(_CANCEL_S / 3)
                return

    def said(self) -> str:
        """What srun and the tasks said so far; lines of the task of component i begin with ``i: ``."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _look(self, *options: str) -> TrialState | None:
        """None where squeue does not know the job, or gives no answer."""
        command = ["squeue", "-h", "-n", self._name, "-o", "%i|%T|%N|%r", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5)
        except subprocess.TimeoutExpired:
            return None
        rows = sorted(line.split("|", 3) for line in done.stdout.splitlines() if line.count("|") >= 3)
        if not rows:
            return None
        nodes = {int(row[0].partition("+")[2] or 0): row[2] for row in rows if row[2]}
        reasons = [word for word in dict.fromkeys(row[3] for row in rows) if word != "None"]
        waiting = next((row[1] for row in rows if row[1] not in ("RUNNING", "COMPLETING")), rows[0][1])
        return TrialState(rows[0][0].partition("+")[0], waiting, ", ".join(reasons), nodes)


def srun_words(
    name: str, cluster: ClusterConfig, parts: Sequence[Component], commands: dict[str, list[str]], minutes: int
) -> list[str]:
    """The command line: each component's own options, cut down to one small task on one node."""
    words = ["srun"]
    for i, part in enumerate(parts):
        words += [":"] if i else []
        words += [f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--time={minutes}", "--mpi=none"]
        words += ["--kill-on-bad-exit=0", "--unbuffered", "--label"] if not i else ["--kill-on-bad-exit=0", "--label"]
        words += [f"--{key}={value}" if value else f"--{key}" for key, value in _small(part.options).items()]
        words += [word for word in cluster.srun_args if i == 0]
        lines = setup_lines(cluster.modules, [*cluster.setup, *getattr(cluster, part.name).setup])
        command = commands[part.name]
        words += ["bash", "-c", "\n".join(["set -e", *lines, f"exec {shlex.join(command)}"])] if lines else command
    return words


def _small(options: dict[str, str]) -> dict[str, str]:
    """What tells where the component would run, and little of what it would use."""
    small = {key: value for key, value in options.items() if key not in _LEFT_OUT}
    if small.get("cpus-per-task", "").isdigit():
        small["cpus-per-task"] = str(min(_SMALL_CPUS, int(small["cpus-per-task"])))
    if "mem" in small:
        small["mem"] = f"{_SMALL_MIB}M"
    if wanted := small.get("gpus-per-node"):
        small["gpus-per-node"] = re.sub(r"\d+$", "1", wanted)
    if wanted := small.get("nodelist"):
        small["nodelist"] = expand_hosts(wanted)[0]
    small.pop("licenses", None)
    return small
