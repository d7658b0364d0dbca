"""A child process, run to its end without holding up the loop."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time

from prorl_hpc.sandbox.tools.output import READ_BYTES
from prorl_hpc.sandbox.tools.processes import descendants, kill, set_limits, start_ticks
from prorl_hpc.sandbox.tools.toolset import Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import NoReturn

DRAIN_S = 0.2
"""How long output is waited for that something in the background may still hold open after the child's end."""


class Collected:
    """The first ``limit`` bytes of a stream; ``overflow`` when there were more."""

    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        self.overflow = False
        self._limit = limit

    def add(self, data: bytes) -> None:
        room = self._limit - len(self.data)
        self.data += data[:room]
        self.overflow = self.overflow or len(data) > room


class Child:
    """One child in a session of its own: what it writes goes to ``take_output`` and ``take_errors``, which must not
    raise. ``body`` runs in the child, with stdin, stdout and stderr in place: it replaces the process, or returns an
    exit code."""

    def __init__(
        self,
        host: Host,
        body: Callable[[], int],
        take_output: Callable[[bytes], None],
        take_errors: Callable[[bytes], None],
        stdin: bytes = b"",
    ) -> None:
        self._host = host
        self._unsent = memoryview(stdin)
        self._code: int | None = None
        ends = [os.pipe() for _ in range(3)]  # close-on-exec
        self._stdin, self._open = ends[0][1], {ends[1][0], ends[2][0]}
        try:
            self._pid = os.fork()
        except OSError as error:
            for fd in (*ends[0], *ends[1], *ends[2]):
                os.close(fd)
            raise Refused(f"no process can be started in the sandbox: {error.strerror}; end some that run") from None
        if self._pid == 0:
            _become(host, body, [ends[0][0], ends[1][1], ends[2][1]])
        host.reaper.expect(self._pid, self._ended)
        self._known = (self._pid, start_ticks(self._pid))
        for fd in (ends[0][0], ends[1][1], ends[2][1]):
            os.close(fd)
        os.set_blocking(self._stdin, False)
        host.loop.watch(self._stdin, self._on_stdin, selectors.EVENT_WRITE)
        self._read(ends[1][0], take_output)
        self._read(ends[2][0], take_errors)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def code(self) -> int | None:
        """Its exit code (128 + signal where one killed it); None while it runs."""
        return self._code

    def wait(self, call: Call, deadline: float) -> Generator[float, None, int | None]:
        """Its exit code (128 + signal where one killed it); None when it was killed, with all that it had started,
        since ``deadline`` (monotonic seconds) had passed or the call was cancelled."""
        try:
            while self._code is None and not call.cancelled and time.monotonic() < deadline:
                yield deadline
            code = self._code
            while self._code is None:
                self._kill()
                yield time.monotonic() + 0.05
            drained = time.monotonic() + DRAIN_S
            while self._open and time.monotonic() < drained:
                yield drained
            return code
        finally:
            self._close()

    def _read(self, fd: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._host.loop.watch(fd, lambda: self._on_output(fd, take))

    def _kill(self) -> None:
        kill(descendants(self._pid, set()) | {self._known})

    def _ended(self, code: int) -> None:
        self._code = code

    def _on_output(self, fd: int, take: Callable[[bytes], None]) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            take(data)
        else:
            self._open.discard(fd)
            self._host.loop.close(fd)

    def _on_stdin(self) -> None:
        try:
            if self._unsent:
                self._unsent = self._unsent[os.write(self._stdin, self._unsent[:READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = self._unsent[:0]  # it does not read: its own affair
        if not self._unsent:
            self._host.loop.close(self._stdin)
            self._stdin = -1

    def _close(self) -> None:
        for fd in (*self._open, *([self._stdin] if self._stdin >= 0 else [])):
            self._host.loop.close(fd)
        self._open.clear()
        self._stdin = -1


def program(argv: Sequence[str], cwd: str, env: dict[str, str]) -> Callable[[], int]:
    """A child's body that becomes this program; 127 where there is none, 126 where it cannot be started, as in a
    directory that is not there."""

    def body() -> int:
        try:
            os.chdir(cwd)
        except OSError as error:
            os.write(
                2, f"{argv[0]} was not started: the directory {cwd}: {error.strerror}\n".encode("utf-8", "replace")
            )
            return 126
        try:
            os.execvpe(argv[0], list(argv), env)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
            return 127 if isinstance(error, FileNotFoundError) else 126

    return body


def _become(host: Host, body: Callable[[], int], ends: list[int]) -> NoReturn:
    code = 125
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        # Python ignores the first two, and a program would inherit that; the others are the server's.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for target, source in enumerate(ends):
            os.dup2(source, target)
        os.closerange(3, 1 << 16)
        set_limits(host.settings.limits)
        code = body()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        sys.stdout.flush()
        os._exit(code)
