"""One process at a time submits a run: an advisory lock on its file ``lock``, which says who has it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""From a file system that has none, such as Lustre mounted without ``flock``: there only the attempt's number, which is
one process's alone, keeps two submissions apart."""


class RunDirectoryError(ValueError):
    """A directory is missing, someone else's, or makes socket paths too long."""


class RunLocked(RunDirectoryError):
    """Another process has the run's lock."""


class RunLock:
    """A context that holds the lock, or until ``release``; the kernel ends it with the process. Where the file system
    passes locks on (NFS does), it holds between hosts."""

    def __init__(self, file: Path, run_id: str, verb: str, then: str = "") -> None:
        """``then``: what to do once it is free; else to look at the run."""
        self._file, self._run_id, self._verb = file, run_id, verb
        self._then = then or f"look with `prorl-hpc status {file.parent}`"
        self._fd: int | None = None

    def __enter__(self) -> RunLock:
        # A new process must not inherit it: os.open sees to that.
        self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
            self._close()
            raise RunLocked(
                f"{holder or 'another process'} is at {self._run_id} right now: wait until it is done, then {self._then}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._close()
                raise
        since = time.strftime("%H:%M:%S")
        self._say(f"`prorl-hpc {self._verb}` (process {os.getpid()} on {socket.gethostname()}, since {since})")
        return self

    @property
    def held(self) -> bool:
        return self._fd is not None

    def release(self) -> None:
        """Again does nothing."""
        if self._fd is not None:
            self._say("")
            self._close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _say(self, holder: str) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, holder.encode(), 0)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
