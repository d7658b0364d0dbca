"""The processes that a bench starts: each with its log, and none of them outlives the bench.

Every one gets the bench's mark in its environment, which its own children inherit; whatever bears it is killed at
the end, in whichever process group or session it went.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from prorl_hpc.messages.errors import RunError

_MARK = "PRORL_BENCH_MARK"
_TAIL_LINES = 15


class Processes:
    """Use as a context; ``logs`` is the directory of ``<name>.log``."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._mark = secrets.token_hex(16)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start ``command`` as ``name``; one that runs under this name must have ended."""
        assert not self.runs(name), f"{name} is running"
        environment = {**os.environ, **(env or {}), _MARK: self._mark}
        with (self._logs / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def runs(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def check(self, but: str = "") -> None:
        """RunError with the last lines of its log if a process other than ``but`` has ended."""
        for name, child in self._running.items():
            if name != but and (code := child.poll()) is not None:
                raise RunError(f"{name} ended with exit code {code}; its last lines:\n{self.tail(name)}")

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        child = self._running.pop(name)
        child.kill()
        child.wait()

    def stop(self, name: str, timeout_s: float = 20.0) -> int:
        """SIGTERM; the exit code. RunError if it does not end."""
        child = self._running.pop(name)
        child.terminate()
        return self._ended(name, child, timeout_s)

    def wait(self, name: str, timeout_s: float) -> int:
        """The exit code. RunError if it does not end by itself."""
        return self._ended(name, self._running.pop(name), timeout_s)

    def tail(self, name: str) -> str:
        lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(f"  {name}: {line}" for line in lines[-_TAIL_LINES:])

    def tails(self) -> str:
        return "\n".join(self.tail(log.stem) for log in sorted(self._logs.glob("*.log")))

    def kill_all(self) -> None:
        """Everything that bears the mark, until nothing does."""
        for _ in range(20):
            left = list(self._marked())
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for child in self._running.values():
            child.kill()
            child.wait()
        self._running.clear()

    def _ended(self, name: str, child: subprocess.Popen[bytes], timeout_s: float) -> int:
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise RunError(f"{name} did not end within {timeout_s:g} s; its last lines:\n{self.tail(name)}") from None

    def _marked(self) -> Iterator[int]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark:
                    yield process.pid
