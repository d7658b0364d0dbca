"""``bash``: persistent shells.

A shell's commands arrive through a pipe, whole, however long. Each command writes to a terminal of its own: what an
earlier command left in the background can never appear in a later one's output.
"""

from __future__ import annotations

import binascii
import fcntl
import os
import re
import selectors
import shutil
import signal
import struct
import termios
import time

from prorl_hpc.sandbox.tools.output import READ_BYTES, BoundedOutput
from prorl_hpc.sandbox.tools.processes import descendants, kill, set_limits, start_ticks
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, ClassVar, NoReturn

INTERRUPT_S = 3.0
"""How long an interrupted shell may take to be usable again before it is replaced."""
STALE_TERMINALS = 64
"""Terminals of earlier commands that background processes still hold, at most."""
_NOT_FOR_SHELLS = re.compile(r"APPTAINER|SINGULARITY|PS1$|PROMPT_COMMAND$|PRORL_")


def open_terminal() -> tuple[int, int]:
    """A pty that changes no byte and echoes nothing."""
    master, slave = os.openpty()
    mode = termios.tcgetattr(slave)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    os.set_blocking(master, False)
    return master, slave


class Command:
    """One command in the shell: its terminal, its output, and the marks by which the shell says that it is done.

    A mark is \\1 nonce : serial : exit code : directory \\2. A command is over when the mark with the newest serial
    arrived, so nothing that we wrote to the shell is still unread then."""

    def __init__(self, text: str, limit: int, last_code: int) -> None:
        self.master, self.slave = open_terminal()
        self.text = text
        self.output = BoundedOutput(limit)
        self._last_code = last_code
        self.exit_code: int | None = None
        self.cwd = ""
        self.done = False
        self.muted = False
        self._nonce = binascii.hexlify(os.urandom(8)).decode()
        self._serial = 0
        self._held = b""

    def script(self) -> bytes:
        quoted = "'" + self.text.replace("'", "'\\''") + "'"
        # "command" keeps a syntax error from throwing sh back to its prompt, past the mark.
        line = f"\\command eval {quoted} </dev/null >{os.ttyname(self.slave)} 2>&1\n"
        if self._last_code:
            line = f"(exit {self._last_code}); {line}"  # $? is what it was, whatever our marks did
        return line.encode("utf-8", "replace") + self.probe()

    def probe(self) -> bytes:
        """A line that makes the shell write the next mark."""
        self._serial += 1
        line = '\\command printf \'\\001{}:{}:%s:%s\\002\' "$?" "$PWD" >{}\n'
        return line.format(self._nonce, self._serial, os.ttyname(self.slave)).encode()

    def feed(self, data: bytes) -> None:
        self._held += data
        head = f"\x01{self._nonce}:".encode()
        while not self.done:
            start = self._held.find(head)
            end = self._held.find(b"\x02", start) if start >= 0 else -1
            if end < 0:
                # What may yet become a mark waits; the rest is output.
                last = self._held.rfind(b"\x01", max(0, len(self._held) - len(head)))
                keep = start if start >= 0 else last if last >= 0 else len(self._held)
                self._add(self._held[:keep])
                self._held = self._held[keep:]
                return
            self._add(self._held[:start])
            serial, code, cwd = self._held[start + len(head) : end].split(b":", 2)
            self._held = self._held[end + 1 :]
            self.exit_code = int(code)
            self.cwd = cwd.decode("utf-8", "replace")
            self.done = int(serial) == self._serial

    def close_slave(self) -> None:
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    def _add(self, data: bytes) -> None:
        if not self.muted:
            self.output.add(data)


class ShellProcess:
    """The shell process: bash, else sh."""

    def __init__(self, host: Host) -> None:
        settings = host.settings
        self._reaper = host.reaper
        self._limits = settings.limits
        self._root = settings.root
        inherited = dict(os.environ) if settings.inherit_env else {}
        self._env = {name: value for name, value in inherited.items() if not _NOT_FOR_SHELLS.match(name)}
        self._env.update({"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "PS1": "", "PS2": ""})
        self._env.update(settings.env)
        bash = shutil.which("bash", path=self._env.get("PATH"))
        flags = ["--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i"]
        self._argv = [bash, *flags] if bash else ["/bin/sh", "-i"]
        self.pid = 0
        self.status = 0
        self.input = -1
        self.terminal = self._slave = -1

    def start(self) -> None:
        # Our own hold on the slave: a shell that execs lets go of it, and a terminal nobody holds hangs up.
        self.terminal, self._slave = open_terminal()
        commands, self.input = os.pipe()
        os.set_blocking(self.input, False)
        self.pid = os.fork()
        if self.pid == 0:
            self._become(commands, self._slave)
        self._reaper.expect(self.pid, self._ended)
        os.close(commands)

    def _become(self, commands: int, slave: int) -> NoReturn:
        try:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for source, target in ((commands, 0), (slave, 1), (slave, 2)):
                os.dup2(source, target)
            # Python ignores these, and children would inherit that.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self._root)
            set_limits(self._limits)
            os.execve(self._argv[0], [os.path.basename(self._argv[0]), *self._argv[1:]], self._env)
        finally:
            os._exit(127)

    def close(self) -> None:
        """Let go of a shell that ended."""
        os.close(self.input)
        os.close(self._slave)
        self.input = self._slave = -1

    def _ended(self, status: int) -> None:
        self.pid = 0
        self.status = status


class Shell:
    """One named shell and what runs in it."""

    def __init__(self, host: Host) -> None:
        self._loop = host.loop
        self._settings = host.settings
        self._process = ShellProcess(host)
        self._to_shell = b""
        self._stale: list[int] = []
        self._last_code = 0
        self._busy = False

    def run(self, call: Call, text: str) -> Generator[float, None, Answer]:
        while self._busy:  # commands of one shell take turns
            if call.cancelled:
                return Answer("[cancelled before it began]\n", None, timed_out=True)
            yield time.monotonic() + 0.05
        self._busy = True
        try:
            return (yield from self._run(call, text))
        finally:
            self._busy = False

    def _run(self, call: Call, text: str) -> Generator[float, None, Answer]:
        lost = yield from self._revive()
        process = self._process
        spared = {(process.pid, start_ticks(process.pid))}
        spared |= descendants(os.getpid(), spared) | descendants(process.pid, set())
        command = Command(text, self._settings.output_limit_bytes, self._last_code)
        self._loop.watch(command.master, lambda: self._on_terminal(command.master, command.feed))
        self._write(command.script())
        deadline = time.monotonic() + call.timeout_s
        while not (command.done or call.cancelled or not process.pid or time.monotonic() >= deadline):
            yield deadline
        timed_out, note = False, ""
        if not command.done and process.pid:
            timed_out = True
            note = yield from self._interrupt(call, command, spared)
        elif not command.done:
            note = yield from self._shell_ended(command)
        self._leave(command)
        self._last_code = 130 if timed_out else command.exit_code or 0
        code = None if timed_out else command.exit_code
        output = command.output.text(self._settings.strip_ansi)
        if note:
            output += ("\n" if output and not output.endswith("\n") else "") + note
        return Answer(lost + output, code, timed_out=timed_out, cwd=command.cwd)

    # -- the process

    def _start(self) -> None:
        self._process.start()
        terminal = self._process.terminal
        self._loop.watch(terminal, lambda: self._on_terminal(terminal, lambda data: None))
        # Or the end of a background job is announced in the output of some later command.
        self._write(b"set +m\n")

    def _revive(self) -> Generator[float, None, str]:
        """A shell that takes commands; says so where it is a new one."""
        if self._process.pid:
            return ""
        note = ""
        if self._process.input >= 0:
            note = self._restart_note()
            yield from self._drop()
        self._start()
        return note

    def _restart_note(self) -> str:
        text = "[the shell ended with status {} and was started again: its variables and directory are lost]\n"
        return text.format(self._process.status)

    def _drop(self) -> Generator[float, None, None]:
        """Forget the shell that ended, or end it."""
        while self._process.pid:
            os.kill(self._process.pid, signal.SIGKILL)
            yield time.monotonic() + 0.05
        if self._to_shell:
            self._loop.unwatch(self._process.input)
            self._to_shell = b""
        self._loop.close(self._process.terminal)
        self._process.close()

    def _interrupt(self, call: Call, command: Command, spared: set[tuple[int, int]]) -> Generator[float, None, str]:
        """Kill all that the command started and bring the shell back to where it takes the next one."""
        command.muted = True
        why = "cancelled" if call.cancelled else "timed out"
        note = f"[{why}: the command's processes were killed]\n"
        give_up = time.monotonic() + INTERRUPT_S
        started = self._started_by(spared)
        while time.monotonic() < give_up and self._process.pid and (started or not command.done):
            kill(started)
            if not command.done:
                os.kill(self._process.pid, signal.SIGINT)
                self._write(command.probe())
            until = time.monotonic() + 0.1
            while time.monotonic() < until and self._process.pid and not command.done:
                yield until
            yield 0.0
            started = self._started_by(spared)
        kill(started)
        if not command.done:
            yield from self._drop()
            note += "[the shell did not react and was started again: its variables and directory are lost]\n"
        return note

    def _started_by(self, spared: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """What runs now and did not before: children of the shell, and orphans, which are ours."""
        found = descendants(os.getpid(), spared)
        return found | descendants(self._process.pid, spared) if self._process.pid else found

    def _shell_ended(self, command: Command) -> Generator[float, None, str]:
        """The command was ``exit`` or the like: collect what it wrote, and be ready for a new shell."""
        command.close_slave()
        until = time.monotonic() + 0.1  # something in the background may hold the terminal open
        while self._loop.watches(command.master) and time.monotonic() < until:
            yield until
        command.exit_code = self._process.status
        note = self._restart_note()
        yield from self._drop()
        return note

    def _leave(self, command: Command) -> None:
        """Its terminal stays open, unread by anyone, for what it left in the background."""
        command.close_slave()
        master = command.master
        if not self._loop.watches(master):
            return
        self._loop.watch(master, lambda: self._on_terminal(master, lambda data: None))
        self._stale.append(master)
        if len(self._stale) > STALE_TERMINALS:
            self._loop.close(self._stale.pop(0))

    # -- bytes

    def _on_terminal(self, fd: int, take: Callable[[bytes], None]) -> None:
        try:
            take(os.read(fd, READ_BYTES))
        except BlockingIOError:
            pass
        except OSError:  # EIO: nobody has the other side open any more
            self._loop.close(fd)
            if fd in self._stale:
                self._stale.remove(fd)

    def _on_input(self) -> None:
        try:
            self._to_shell = self._to_shell[os.write(self._process.input, self._to_shell) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._to_shell = b""  # the shell ended; SIGCHLD tells
        if not self._to_shell:
            self._loop.unwatch(self._process.input)

    def _write(self, data: bytes) -> None:
        if not self._to_shell:
            self._loop.watch(self._process.input, self._on_input, selectors.EVENT_WRITE)
        self._to_shell += data


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {"bash": {"command": str}}

    def __init__(self, host: Host) -> None:
        self._shell = Shell(host)

    def bash(self, call: Call, command: str) -> Generator[float, None, Answer]:
        if "\0" in command:
            raise Refused("the command holds a NUL byte, which no shell can take")
        return (yield from self._shell.run(call, command))
