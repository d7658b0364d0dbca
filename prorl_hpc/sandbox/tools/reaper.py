"""Children that ended: all of them are waited for, the known ones are told of."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from prorl_hpc.sandbox.tools.loop import Loop
else:
    import _signal as signal  # the module signal makes enumerations of its numbers, for which every start would wait


class Reaper:
    """As PID 1 or subreaper of the sandbox, the server gets everybody's orphans."""

    def __init__(self, loop: Loop, on_signal: Callable[[int], None]) -> None:
        """``on_signal`` is called with SIGTERM."""
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._on_signal = on_signal
        self._wake, wake_write = os.pipe()
        for fd in (self._wake, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        loop.watch(self._wake, self._woken)

    def expect(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call ``ended`` with the exit code (128 + signal where one killed it) of our child ``pid``."""
        self._waiting[pid] = ended

    def _woken(self) -> None:
        if signal.SIGTERM in os.read(self._wake, 65536):
            self._on_signal(signal.SIGTERM)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if ended := self._waiting.pop(pid, None):
                ended(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
