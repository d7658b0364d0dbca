"""All processes that one start of an LLM server has made, wherever they went, and the shared memory that they made.

A process group does not do: vLLM's engine and tensor-parallel workers may make sessions of their own, and would keep the
GPU's memory when their group is gone. They are known by a mark in their environment, and as descendants, seen while their
parents lived: vLLM's workers write their titles over their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

MARK = "PRORL_LLM_SERVER"
_SHARED = re.compile(r"(/dev/shm/(?:vllm|psm_|sem\.mp-|torch_)\S+)$", re.MULTILINE)
"""Made by the server; the weights of an update, which lie there too, are not."""


def kill_marked(mark: str) -> list[psutil.Process]:
    """SIGKILL all that carry ``mark``, but for this process; returns those that were still there."""
    return _kill({p for p in psutil.process_iter() if p.pid != os.getpid() and _carries(p, mark)})


class ServerKin:
    """Of the server whose processes carry ``mark``. Blocks for as long as a look at all processes of the node takes."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seen: set[psutil.Process] = set()
        self._shared_memory: set[Path] = set()

    def look(self, pid: int) -> None:
        """Note what descends from process ``pid``, and the shared memory that they have mapped: once they are killed, nobody
        knows it any more."""
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(pid)
            self._seen |= {leader, *leader.children(recursive=True)}
        for process in self._seen:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text() if process.is_running() else ""
                self._shared_memory |= {Path(name) for name in _SHARED.findall(maps)}

    def kill(self) -> list[psutil.Process]:
        """SIGKILL all of them; returns those that were still there."""
        return [*_kill({p for p in self._seen if _runs(p)}), *kill_marked(self._mark)]

    def remove_shared_memory(self) -> None:
        """When all of them are gone."""
        for path in self._shared_memory:
            path.unlink(missing_ok=True)
        self._shared_memory = set()


def _kill(found: set[psutil.Process]) -> list[psutil.Process]:
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return list(found)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark and _runs(process))
    except psutil.Error:
        return False


def _runs(process: psutil.Process) -> bool:
    """It is the same process still (not another under its number), and no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
