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
        """``on_signal`` is called with SIGTERM and SIGINT; not as PID 1, to whom the kernel lets nobody inside send what
        it does not handle: `pkill python3` is meant for the agent's own."""
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._on_signal = on_signal
        self._wake, wake_write = os.pipe()
        for fd in (self._wake, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        first = os.getpid() == 1
        signal.signal(signal.SIGCHLD, _only_wake)
        for number in (signal.SIGTERM, signal.SIGINT):  # Python itself handles the latter
            signal.signal(number, signal.SIG_DFL if first else _only_wake)
        loop.watch(self._wake, self._woken)

    def expect(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call ``ended`` with the exit code (128 + signal where one killed it) of our child ``pid``."""
        self._waiting[pid] = ended

    def _woken(self) -> None:
        received = os.read(self._wake, 65536)
        for number in (signal.SIGTERM, signal.SIGINT):
            if number in received:
                self._on_signal(number)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if ended := self._waiting.pop(pid, None):
                ended(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _only_wake(*_: object) -> None:
    """A signal with a handler is written to the wakeup descriptor."""
