"""The first death of a run, in ``state/FAILED.json``: whoever writes it first is right."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json


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
    """Write it unless another node was faster; whole or not at all. True if ours is the one."""
    stamped = msgspec.structs.replace(failure, time=time.time())
    fd, aside = tempfile.mkstemp(dir=run.state, prefix=".failed.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(stamped))
        run.failure_file.hardlink_to(aside)  # unlike a rename, a link never replaces
        return True
    except FileExistsError:
        return False
    finally:
        Path(aside).unlink(missing_ok=True)


def read_failure(run: RunDirectory) -> RunFailure | None:
    return read_json(run.failure_file, RunFailure)
