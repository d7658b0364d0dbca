"""The first death of a run, in ``state/FAILED.json``: whoever writes it first is right."""

from __future__ import annotations

import logging
import sys
import time

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.marks import make_mark, read_mark

log = logging.getLogger(__name__)


class RunFailure(msgspec.Struct, frozen=True):
    """``what``: ``exited with code 1``, ``was not ready after 600 s``, …"""

    name: str
    node: str
    what: str
    exit_code: int | None = None
    last_lines: list[str] = []
    log: str = ""
    time: float = 0.0

    def __str__(self) -> str:
        lines = "".join(f"\n  | {line}" for line in self.last_lines)
        log = f"\nwhole log: {self.log}" if self.log else ""
        return f"{self.headline}{lines}{log}"

    @property
    def headline(self) -> str:
        """It on one line."""
        return f"{self.name} on {self.node} {self.what}" if self.node else f"{self.name} {self.what}"


def record_failure(run: RunDirectory, failure: RunFailure) -> bool:
    """Write it unless another node was faster; whole or not at all. True if ours is the one. Raises OSError."""
    return make_mark(run.failure_file, msgspec.structs.replace(failure, time=time.time()))


def read_failure(run: RunDirectory) -> RunFailure | None:
    found = read_mark(run.failure_file, RunFailure)
    if isinstance(found, str):
        where = f"it could not be written down: is the disk of {run.path} full?"
        return RunFailure("a process", "", f"failed, and {found or where} Look into {run.logs}")
    return found


class FailureTeller:
    """Records a failure of the attempt, and keeps it where that is not possible."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.unrecorded: RunFailure | None = None
        """The failure that could not be written into the run directory."""

    def tell(self, failure: RunFailure) -> None:
        """Raises nothing: the end must go on."""
        try:
            if record_failure(self._run, failure):
                log.error("%s", failure)
        except OSError as error:
            log.error("%s (and that could not be recorded: %s)", failure, error)
            print(f"{failure}\n(this could not be recorded: {error})", file=sys.stderr)
            self.unrecorded = failure

    def told(self) -> RunFailure | None:
        """The failure that holds."""
        return self.unrecorded or read_failure(self._run)

    def headline(self) -> str:
        failure = self.told()
        return failure.headline if failure is not None else "a process failed"
