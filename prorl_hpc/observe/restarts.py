"""Processes that died and were started again: each node's supervisor writes them, display and ``status`` read them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import read_json, write_json


class Restart(msgspec.Struct, frozen=True):
    """``what``: how it ended, ``was killed by SIGKILL``. It is its ``count``-th restart of ``allowed`` in this job.
    ``time``: of the death, seconds since the epoch."""

    name: str
    node: str
    what: str
    count: int
    allowed: int
    time: float

    @property
    def told(self) -> str:
        """For people, without the name."""
        return f"{self.what}: started again ({self.count} of {self.allowed})"

    def __str__(self) -> str:
        return f"{self.name} {self.told}"


class RestartLog:
    """The restarts of one node."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._restarts: list[Restart] = []

    def append(self, restart: Restart) -> None:
        self._restarts.append(restart)
        write_json(self._file, self._restarts)


def read_restarts(run: RunDirectory) -> list[Restart]:
    """Of all nodes, oldest first. A file that does not read is left out: this is for display."""
    found: list[Restart] = []
    for file in run.restart_files():
        try:
            found += read_json(file, list[Restart]) or []
        except (OSError, msgspec.MsgspecError):
            continue
    return sorted(found, key=lambda restart: restart.time)
