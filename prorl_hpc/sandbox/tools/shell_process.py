"""The process of a shell: bash on a terminal of its own, its commands coming through a pipe, whole, however long."""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import shutil
import signal
import sys
import termios

from ptyprocess import PtyProcess

from prorl_hpc.sandbox.tools.processes import adopt_orphans, descendants, set_limits
from prorl_hpc.sandbox.tools.terminal import COLUMNS, ROWS, set_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prorl_hpc.sandbox.tools.toolset import Host

_NOT_FOR_SHELLS = re.compile(r"APPTAINER|SINGULARITY|PS1$|PROMPT_COMMAND$|PRORL_(?!SOCKET_)")
_FLAGS = ["--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i"]


def environment(host: Host) -> dict[str, str]:
    """Of all that runs for the agent."""
    inherited = os.environ if host.settings.inherit_env else {}
    env = {name: value for name, value in inherited.items() if not _NOT_FOR_SHELLS.match(name)}
    env.update({"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", **host.settings.env})
    return env


def shells(host: Host) -> list[list[str]]:
    """Those to try, the best first: the image's bash, which need not run, and the kit's; sh where the kit has none.
    The first that answers is the one: quicker than to try it beforehand."""
    bash = shutil.which("bash", path=environment(host).get("PATH"))
    found = [[bash, *_FLAGS]] if bash else []
    kit_bash = f"{host.kit}/bin/bash"
    if host.kit and os.path.exists(kit_bash):
        loader = [f"{host.kit}/ld.so", "--library-path", f"{host.kit}/lib", "--argv0", "bash"]
        return [*found, [*loader, kit_bash, *_FLAGS]]
    return [*found, ["/bin/sh", "-i"]]


class ShellProcess:
    """Not waited for by ptyprocess: the reaper waits for all children. ``candidates`` (see ``shells``) are shared; they
    lose what does not run, and all but the one that did."""

    def __init__(self, host: Host, candidates: list[list[str]]) -> None:
        self._host = host
        self._candidates = candidates
        self._env = {**environment(host), "PS1": "", "PS2": ""}
        self._pty: PtyProcess | None = None
        self._unread = b""
        self.pid = 0
        """0 when it does not run."""
        self.status = 0
        """How it ended: 128 + signal where one killed it."""
        self._commands = self._children = -1

    @property
    def begun(self) -> bool:
        """It runs, or has ended without being closed."""
        return self._pty is not None

    @property
    def terminal(self) -> int:
        """The master."""
        assert self._pty is not None
        fd: int = self._pty.fd
        return fd

    def start(self) -> None:
        """OSError when there is no shell that can be started."""
        while True:
            try:
                return self._start()
            except BlockingIOError:
                raise  # too many processes
            except OSError:
                if not self.try_another():
                    raise

    def answered(self) -> None:
        """It works."""
        del self._candidates[1:]

    def try_another(self) -> bool:
        """Whether there is another shell to start, where none has answered yet."""
        if len(self._candidates) == 1:
            return False
        self._candidates.pop(0)
        return True

    def _start(self) -> None:
        theirs, self._commands = os.pipe()
        settings = self._host.settings

        def prepare() -> None:
            os.dup2(theirs, 0)
            os.close(theirs)
            # Python ignores these, and children would inherit that.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            adopt_orphans()  # so all that a command started is found below its shell
            set_limits(settings.limits)

        try:
            self._pty = PtyProcess.spawn(
                self._candidates[0],
                cwd=settings.root,
                env=self._env,
                echo=False,
                preexec_fn=prepare,
                dimensions=(ROWS, COLUMNS),
                pass_fds=(theirs,),
            )
        except BaseException:
            os.close(self._commands)
            raise
        finally:
            os.close(theirs)
        self.pid = self._pty.pid
        self._host.reaper.expect(self.pid, self._ended)
        set_mode(self.terminal)
        os.set_blocking(self.terminal, False)
        os.set_blocking(self._commands, False)
        self._children = os.open(f"/proc/{self.pid}/task/{self.pid}/children", os.O_RDONLY | os.O_CLOEXEC)

    def write(self, data: bytes) -> None:
        """For the shell to read as soon as it does."""
        self._unread += data
        self._push()

    @property
    def unread_bytes(self) -> int:
        """Of what was written for the shell; a shell reads byte by byte what it is about to run."""
        in_pipe = fcntl.ioctl(self._commands, termios.FIONREAD, bytes(4))
        return len(self._unread) + int.from_bytes(in_pipe, sys.byteorder)

    @property
    def alone(self) -> bool:
        """Nothing runs below it. Cheap: a shell has one thread, and gets the orphans of what it started."""
        try:
            return not os.pread(self._children, 1, 0)
        except ProcessLookupError:
            return True  # it ended, and we are yet to be told

    def descendants(self, spared: set[tuple[int, int]]) -> set[tuple[int, int]]:
        return descendants(self.pid, spared) if self.pid else set()

    def signal(self, number: int) -> None:
        if self.pid:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Let go of a shell that ended."""
        assert self._pty is not None and not self.pid
        self._unread = b""
        os.close(self._children)
        self._host.loop.close(self._commands)
        self._host.loop.unwatch(self.terminal)
        self._pty.fileobj.close()
        self._pty.closed = True  # or ptyprocess would look for the process
        self._pty = None

    def _push(self) -> None:
        loop = self._host.loop
        waited, gone = loop.watches(self._commands), False
        try:
            self._unread = self._unread[os.write(self._commands, self._unread) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the shell ended; SIGCHLD tells
            gone = True
        if self._unread and not waited and not gone:
            loop.watch(self._commands, self._push, selectors.EVENT_WRITE)
        elif waited and (gone or not self._unread):
            loop.unwatch(self._commands)

    def _ended(self, status: int) -> None:
        self.pid = 0
        self.status = status
