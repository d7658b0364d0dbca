"""Signals as a loop likes them: they wake it, and it takes them when it is ready."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable


class SignalPipe:
    """Takes over ``numbers`` in this process's main thread."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.seen: set[signal.Signals] = set()
        """All that ever came."""
        self._new: list[signal.Signals] = []
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)  # the pipe says which; Python's default would end us

    def wait(self, seconds: float) -> None:
        """Until a signal comes, at most ``seconds``."""
        if not self._new:
            select.select([self._read], [], [], seconds)
            self._drain()

    def take(self) -> list[signal.Signals]:
        """Those that came since the last call, oldest first."""
        self._drain()
        taken, self._new = self._new, []
        return taken

    def _drain(self) -> None:
        try:
            while numbers := os.read(self._read, 512):
                came = [signal.Signals(number) for number in numbers]
                self._new += came
                self.seen |= {*came}
        except BlockingIOError:
            return
