"""Single keys from the terminal, without Enter and without echo."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any


class TerminalKeys:
    """While it is entered, keys come one by one; the terminal is as before afterwards. Without a terminal on standard
    input no key ever comes."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> TerminalKeys:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)  # Ctrl-C stays a signal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The next key; empty if none comes within ``seconds``."""
        if self._fd is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(self._fd, 1)
        if not pressed:  # the terminal is gone
            self._fd = None
        return pressed.decode(errors="replace")
