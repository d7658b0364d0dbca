"""The process that runs an agent's cells, as the tool server sees it: start, cells in, output out, signals, its end.

It is a process of its own, so that nothing a cell does (exit, crash, hang) reaches the tool server. Its stdout and
stderr are one pipe; messages come over a socket pair. The program is cell_runner.py, under the image's own Python if
that can import IPython, so that the image's packages can be used, else under ours.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import time

from prorl_hpc.sandbox.tools import shell_process
from prorl_hpc.sandbox.tools.output import READ_BYTES, BoundedOutput
from prorl_hpc.sandbox.tools.processes import descendants, kill, send, set_limits
from prorl_hpc.sandbox.tools.toolset import Host, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

START_S = 60.0
"""How long one Python may take until it takes cells."""
RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cell_runner.py")
CONTROL_FD = 3
PIPE_READS = (1 << 20) // READ_BYTES
"""Empty the largest pipe that an unprivileged process can make."""
MAX_MESSAGE_BYTES = 1 << 16
MAX_FILES = 100
"""Named in one answer; a cell may make more."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Python:
    """One way to start a Python; ``site`` is where IPython is, if not where that Python looks by itself."""

    def __init__(self, argv: list[str], site: str) -> None:
        self.argv = argv
        self.site = site


def environment(host: Host) -> dict[str, str]:
    """Of the cells: what the shells have, and a place for what IPython keeps for itself."""
    return {"IPYTHONDIR": f"{host.settings.scratch}/ipython", **shell_process.environment(host)}


def pythons(host: Host) -> list[Python]:
    """Those to try, the best first. Whether the image's has IPython shows when it is started, which is the cheapest
    way to find out."""
    own = host.program("python3")
    site = f"{host.kit}/site" if host.kit else ""
    found = [Python([*own, "-I"], site)] if own else []
    theirs = shutil.which("python3", path=environment(host).get("PATH"))
    if theirs and [theirs] != own:
        found.insert(0, Python([theirs], ""))
    return found


class CellProcess:
    """One interpreter, in-process (the cells go over the control socket). ``candidates`` loses its first for good when
    that one does not come up; others may share it."""

    mode = "inprocess"

    def __init__(self, host: Host, candidates: list[Python]) -> None:
        self._host = host
        self._loop = host.loop
        self._candidates = candidates
        self._arguments: list[str] = []
        self.pid = 0
        self.end = ""
        """How it ended, once it did: "with exit code 3"."""
        self.ready = False
        self.output = BoundedOutput(host.settings.output_limit_bytes)
        """What was written since it was last taken."""
        self.files: list[str] = []
        self.exit_code: int | None = None
        """Of the running cell, once it is over."""
        self._killed = self._stopped = False
        self._began_ticks = 0
        self._started = 0.0
        self._pipe = -1
        self._control = -1
        self._received = b""
        self._unsent = b""
        self._sending = False

    # -- what a tool does with it

    def start(self) -> None:
        """Begin to start; ``ready`` or ``end`` says how it went. OSError when no Python is left to try."""
        if not self._candidates:
            raise OSError("no Python here can run cells: the image's python3 has no IPython, and there is no other")
        self._started = time.monotonic()
        self.ready, self._killed, self._stopped, self.end = False, False, False, ""
        python = self._candidates[0]
        # -B: no __pycache__ among the work, whatever of it a cell imports. What a cell starts does as it likes.
        argv = [*python.argv, "-B", RUNNER, self.mode, python.site, self._host.settings.root, str(CONTROL_FD)]
        self._spawn([*argv, *self._arguments])

    def begin(self, code: str) -> None:
        """Run a cell; ``exit_code`` is set when it is over."""
        self.exit_code = None
        self._host.idle.discard(self.pid)
        self._began_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)
        self._send_cell(code)

    def take(self) -> tuple[str, list[str]]:
        """Output and files since the last take."""
        self.drain()
        taken = self.output.text(self._host.settings.strip_ansi), self.files
        self.output, self.files = BoundedOutput(self._host.settings.output_limit_bytes), []
        return taken

    def interrupt(self) -> None:
        """SIGINT to the interpreter and to what the cell started."""
        if self.pid:
            send(self._started_by_cell() | {(self.pid, 0)}, signal.SIGINT)

    def kill_started(self) -> None:
        """End what the cell started, and leave what runs since an earlier one."""
        if self.pid:
            kill(self._started_by_cell())

    def kill(self) -> None:
        """End it, with all below it; ``end`` is set once it is reaped. What it says of its cell counts no more."""
        if self.pid:
            self.exit_code, self._killed = None, True
            kill(descendants(self.pid, set()) | {(self.pid, 0)})

    def stop(self) -> None:
        """End it because another one is wanted: that it did not come up is not its fault."""
        self._stopped = True
        self.kill()

    def overdue(self) -> bool:
        return bool(self.pid) and not self.ready and time.monotonic() > self._started + START_S

    # -- the process

    def _spawn(self, argv: list[str]) -> None:
        output, output_end = os.pipe()
        ours, theirs = socket.socketpair()
        env = environment(self._host)
        self.pid = os.fork()
        if self.pid == 0:
            _become(self._host.settings, argv, env, output_end, theirs.fileno())
        self._host.reaper.expect(self.pid, self._ended)
        os.close(output_end)
        theirs.close()
        self._pipe, self._control = output, ours.detach()
        for fd in (self._pipe, self._control):
            os.set_blocking(fd, False)
        self._loop.watch(self._pipe, self._on_output)
        self._loop.watch(self._control, self._on_control)

    def _ended(self, status: int) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)  # what it left behind
        except (ProcessLookupError, PermissionError):
            pass
        self._host.idle.discard(self.pid)
        self.pid = 0
        self.drain()
        self._close()
        name = signal.Signals(status - 128).name if 128 < status < 128 + signal.NSIG else ""
        self.end = f"by {name}" if name else f"with exit code {status}"
        if not self.ready and not self._stopped and len(self._candidates) > 1:
            self._candidates.pop(0)
            self.take()
            try:
                self.start()
            except OSError as error:  # whoever waits for it sees that it ended, and why
                self.output.add(str(error).encode())

    def _close(self) -> None:
        self._received = self._unsent = b""
        self._sending = False
        for fd in (self._pipe, self._control):
            if fd >= 0:
                self._loop.close(fd)
        self._pipe = self._control = -1

    def _started_by_cell(self) -> set[tuple[int, int]]:
        return {known for known in descendants(self.pid, set()) if known[1] >= self._began_ticks}

    # -- bytes

    def _on_output(self) -> None:
        self._take_output()

    def drain(self) -> None:
        """Take all that was written up to now."""
        for _ in range(PIPE_READS):  # what goes on writing must not keep us here
            if not self._take_output():
                return

    def _take_output(self) -> bool:
        """Whether there may be more at once."""
        if self._pipe < 0:
            return False
        try:
            data = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.close(self._pipe)
            self._pipe = -1
            return False
        self.output.add(data)
        return len(data) == READ_BYTES

    def _send_cell(self, code: str) -> None:
        self._unsent += json.dumps({"code": code}).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._control, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # it is gone, or going: its end tells
        if bool(self._unsent) != self._sending:
            self._sending = not self._sending
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._sending else 0)
            self._loop.watch(self._control, self._on_control, events)

    def _on_control(self) -> None:
        if self._unsent:
            self._flush()
        try:
            data = os.read(self._control, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(self._control)
            self.kill()  # nothing can be said to it any more
            return
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        try:
            for line in lines:
                self._on_message(json.loads(line))
            if len(self._received) > MAX_MESSAGE_BYTES:
                raise ValueError("a message without an end")
        except (ValueError, TypeError, KeyError, RecursionError):
            self.kill()  # a cell wrote to what is not its own

    def _on_message(self, message: dict[str, Any]) -> None:
        """ValueError, TypeError or KeyError for what cell_runner.py does not send."""
        if "ready" in message:
            self._on_ready()
        elif "file" in message:
            if len(self.files) < MAX_FILES:
                self.files.append(message["file"][:4096].encode().decode())  # str it must be, and can be sent
        elif message["done"] in (0, 1):
            self._done(int(message["done"]))
        else:
            raise ValueError("no exit code of a cell")

    def _done(self, exit_code: int) -> None:
        if not self._killed:
            self.exit_code = exit_code
            self._host.idle.add(self.pid)

    def _on_ready(self) -> None:
        self.take()  # what it said while it started is of no interest now
        self.ready = True
        self._host.idle.add(self.pid)


def _become(settings: Settings, argv: list[str], env: dict[str, str], output: int, control: int) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        # Python ignores the first two, and what a cell starts would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        kept = fcntl.fcntl(control, fcntl.F_DUPFD, 10)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(kept, CONTROL_FD)
        os.closerange(CONTROL_FD + 1, 1 << 16)
        os.chdir(settings.root)
        set_limits(settings.limits)
        os.execve(argv[0], argv, env)
    except BaseException as error:
        os.write(2, f"{argv[0]}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(127)
