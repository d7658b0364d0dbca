# ruff: noqa: PTH103, PTH108, PTH118, PTH119, PTH120, PTH123, PTH208, UP006, UP035, UP045
# Images bring their own Python: 3.6 must do. And it must start fast: no pathlib.
"""The tool server: the one program of ours that runs inside a sandbox.

Started as ``python3 -I -S tool_server.py``; Python >= 3.6 and the standard library are all it needs. Stdin's
first line is its settings, one JSON object: root, socket, env, inherit_env, limits, output_limit_bytes. It then
listens on the socket, writes ``ready`` to stdout, takes exactly one connection and removes the socket, so that
nothing inside can connect to it or put another in its place. EOF on stdin or on the connection, or SIGTERM, ends
it and all it started: that is how a sandbox dies with its worker, however the worker dies.

On the wire, one JSON object a line:

    → {"id": 1, "tool": "bash", "arguments": {"command": "ls"}, "timeout_s": 20}
    ← {"id": 1, "output": "…", "exit_code": 0, "timed_out": false, "seconds": 0.01}
    ← {"id": 1, "error": "…"}      the server could not do its work; a command that fails is no error
    → {"cancel": 1}                the call is interrupted and answered as timed out

There is one interactive shell, whose commands arrive through a pipe, whole, however long. Each command writes to
a terminal of its own: what an earlier command left in the background can never appear in a later one's output.
"""

import base64
import binascii
import collections
import fcntl
import json
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import stat
import struct
import sys
import termios
import time
from typing import Any, Callable, Deque, Dict, List, NoReturn, Optional, Set, Tuple

READ_BYTES = 65536
INTERRUPT_S = 3.0
"""How long an interrupted shell may take to be usable again before it is replaced."""
STALE_TERMINALS = 64
"""Terminals of earlier commands that background processes still hold, at most."""
WORKSPACE = "/workspace"
"""How paths name the root, even where it is another directory."""
_NOT_TEXT = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
_NOT_FOR_SHELLS = re.compile(r"APPTAINER|SINGULARITY|PS1$|PROMPT_COMMAND$|PRORL_")


class Ended(Exception):
    """The worker is gone or wants us to end."""


class Refused(Exception):
    """A tool was called wrongly; the message is for the agent."""


class BoundedOutput:
    """The first and the last bytes of a stream: at most ``limit`` of them, whatever comes."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_room + READ_BYTES:
            self._trim()

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_room
        if excess > 0:
            self._dropped += excess
            del self._tail[:excess]

    def text(self) -> str:
        """As UTF-8, without terminal control sequences."""
        self._trim()
        if not self._dropped:
            return _text(bytes(self._head + self._tail))
        mark = f"\n[... {self._dropped} bytes of output left out here ...]\n"
        return _text(bytes(self._head)) + mark + _text(bytes(self._tail))


def _text(data: bytes) -> str:
    return _NOT_TEXT.sub("", data.decode("utf-8", "replace"))


# --- processes ------------------------------------------------------------------------------------


def _children(pid: int) -> List[int]:
    """Children of all threads of ``pid``; none when it is gone."""
    found: List[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended while we looked
    return found


def _start_ticks(pid: int) -> int:
    """When ``pid`` started, which tells it from a later process of the same number; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def descendants(pid: int, spared: Set[Tuple[int, int]]) -> Set[Tuple[int, int]]:
    """(pid, start) of everything below ``pid``, without the ``spared`` and what these have started."""
    found: Set[Tuple[int, int]] = set()
    pending = _children(pid)
    while pending:
        child = pending.pop()
        known = (child, _start_ticks(child))
        if known not in spared and known not in found:
            found.add(known)
            pending += _children(child)
    return found


def kill(processes: Set[Tuple[int, int]]) -> None:
    for pid, _ in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # gone already, or of another user and out of reach


def become_subreaper() -> None:
    """Orphans of our descendants come to us, so that none can hide. PID 1 gets them anyway."""
    if os.getpid() == 1:
        return
    import ctypes  # not in every minimal Python, and PID 1 does not need it

    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def set_limits(limits: Dict[str, int]) -> None:
    """rlimits of everything that the shell starts; 0 or absent: no limit."""
    _limit(resource.RLIMIT_CORE, 0)
    if limits.get("max_file_mib"):
        _limit(resource.RLIMIT_FSIZE, limits["max_file_mib"] << 20)
    if limits.get("max_memory_mib"):
        _limit(resource.RLIMIT_AS, limits["max_memory_mib"] << 20)
    if limits.get("max_processes") and _processes_are_counted_here():
        _limit(resource.RLIMIT_NPROC, limits["max_processes"])


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _processes_are_counted_here() -> bool:
    """Whether RLIMIT_NPROC counts this sandbox alone: in a user namespace, since Linux 5.14. Elsewhere it counts
    all that the user runs on the node, and would fail the sandbox for what others do."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    with open("/proc/self/uid_map") as file:
        return release >= (5, 14) and file.read().split() != ["0", "0", "4294967295"]


# --- the shell ------------------------------------------------------------------------------------


def open_terminal() -> Tuple[int, int]:
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

    A mark is \\1 nonce : serial : exit code \\2. A command is over when the mark with the newest serial arrived,
    so nothing that we wrote to the shell is still unread then."""

    def __init__(self, text: str, limit: int, last_code: int) -> None:
        self.master, self.slave = open_terminal()
        self.text = text
        self.output = BoundedOutput(limit)
        self._last_code = last_code
        self.exit_code: Optional[int] = None
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
        line = "\\command printf '\\001{}:{}:%s\\002' \"$?\" >{}\n"
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
            serial, _, code = self._held[start + len(head) : end].partition(b":")
            self._held = self._held[end + 1 :]
            self.exit_code = int(code)
            self.done = int(serial) == self._serial

    def close_slave(self) -> None:
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    def _add(self, data: bytes) -> None:
        if not self.muted:
            self.output.add(data)


class Shell:
    """The persistent shell process: bash, else sh."""

    def __init__(self, settings: Dict[str, Any]) -> None:
        self._limits = settings.get("limits", {})
        self._root = settings["root"]
        inherited = dict(os.environ) if settings.get("inherit_env") else {}
        self._env = {name: value for name, value in inherited.items() if not _NOT_FOR_SHELLS.match(name)}
        self._env.update({"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "PS1": "", "PS2": ""})
        self._env.update(settings["env"])
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

    def ended(self, status: int) -> None:
        self.pid = 0
        self.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


# --- files ----------------------------------------------------------------------------------------


class Files:
    """read_file and write_file, within the workspace."""

    def __init__(self, root: str, limit: int) -> None:
        self._root = os.path.realpath(root)
        self._limit = limit

    def _resolve(self, path: str) -> str:
        inside = path
        if path == WORKSPACE or path.startswith(WORKSPACE + "/"):
            inside = path[len(WORKSPACE) :].lstrip("/")
        real = os.path.realpath(os.path.join(self._root, inside))
        if "\0" in path or not real.startswith(self._root + "/"):
            raise Refused(f"the path {path!r} leaves the workspace: expected a file below {WORKSPACE}")
        return real

    def read(self, path: str, encoding: str = "text", offset: int = 0, length: int = 0) -> str:
        """text: cut at the output limit; base64: ``length`` bytes from ``offset``."""
        _check_encoding(encoding)
        with os.fdopen(self._open(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, offset))
            if encoding == "base64":
                return base64.b64encode(file.read(max(0, length))).decode()
            output = BoundedOutput(self._limit)
            for data in iter(lambda: file.read(READ_BYTES), b""):
                output.add(data)
            return output.text()

    def write(self, path: str, content: str, encoding: str = "text", append: bool = False) -> str:
        _check_encoding(encoding)
        try:
            data = (
                base64.b64decode(content, validate=True) if encoding == "base64" else content.encode("utf-8", "replace")
            )
        except binascii.Error as error:
            raise Refused(f"the content is not base64: {error}") from None
        try:
            os.makedirs(os.path.dirname(self._resolve(path)), exist_ok=True)
        except OSError as error:
            raise Refused(f"the directory of {path!r} cannot be made: {error.strerror}") from None
        with os.fdopen(
            self._open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)), "wb"
        ) as file:
            file.write(data)
        return ""

    def _open(self, path: str, flags: int) -> int:
        """Never waits (a FIFO would) and follows no link at the end of the path."""
        try:
            fd = os.open(self._resolve(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise Refused(f"{path!r}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Refused(f"{path!r} is not a regular file")
        return fd


def _check_encoding(encoding: str) -> None:
    if encoding not in ("text", "base64"):
        raise Refused(f"encoding {encoding!r} is unknown: there are text and base64")


# --- the server -----------------------------------------------------------------------------------

ARGUMENTS: Dict[str, Dict[str, type]] = {
    "bash": {"command": str},
    "read_file": {"path": str, "encoding": str, "offset": int, "length": int},
    "write_file": {"path": str, "content": str, "encoding": str, "append": bool},
}
REQUIRED = {"bash": ["command"], "read_file": ["path"], "write_file": ["path", "content"]}


def check_call(tool: Any, arguments: Any) -> None:
    """Raises Refused, in words for an agent."""
    if tool not in ARGUMENTS:
        raise Refused("unknown tool {!r}: there are {}".format(tool, ", ".join(sorted(ARGUMENTS))))
    known = ARGUMENTS[tool]
    takes = "{} takes {}".format(tool, ", ".join(f"{n} ({t.__name__})" for n, t in known.items()))
    if not isinstance(arguments, dict):
        raise Refused(f"the arguments are a {type(arguments).__name__}, not an object: {takes}")
    for name, value in arguments.items():
        if name not in known:
            raise Refused(f"unknown argument {name!r}: {takes}")
        if type(value) is not known[name]:
            raise Refused(f"argument {name} is a {type(value).__name__}: {takes}")
    for name in REQUIRED[tool]:
        if name not in arguments:
            raise Refused(f"argument {name} is missing: {takes}")
    if "\0" in arguments.get("command", ""):
        raise Refused("the command holds a NUL byte, which no shell can take")


class Server:
    def __init__(self, settings: Dict[str, Any]) -> None:
        self._settings = settings
        self._limit = settings["output_limit_bytes"]
        self._files = Files(settings["root"], self._limit)
        self._shell = Shell(settings)
        self._selector = selectors.DefaultSelector()
        self._requests: Deque[Dict[str, Any]] = collections.deque()
        self._received = b""
        self._to_shell = b""
        self._stale: List[int] = []
        self._running: Optional[int] = None
        self._cancelled = False
        self._last_code = 0
        self._connection = self._listen()

    # -- events

    def _watch(self, fd: int, ready: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        self._selector.register(fd, events, ready)

    def _unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _poll(self, timeout_s: float) -> None:
        """Wait for events and handle them. Every wait of the server is here, so it always sees its end coming."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.fd in self._selector.get_map():  # an earlier event of this round may have closed it
                key.data()

    def _listen(self) -> socket.socket:
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self._watch(wake_read, lambda: self._on_signal(wake_read))
        self._watch(0, self._on_stdin)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._settings["socket"])
        listener.listen(1)
        accepted: List[socket.socket] = []
        self._watch(listener.fileno(), lambda: accepted.append(listener.accept()[0]))
        os.write(1, b"ready\n")
        while not accepted:
            self._poll(60)
        self._selector.unregister(listener.fileno())
        listener.close()
        os.unlink(self._settings["socket"])
        self._watch(accepted[0].fileno(), self._on_request)
        return accepted[0]

    def _on_signal(self, fd: int) -> None:
        if signal.SIGTERM in os.read(fd, READ_BYTES):
            raise Ended("SIGTERM")
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._shell.pid:
                self._shell.ended(status)

    def _on_stdin(self) -> None:
        if not os.read(0, READ_BYTES):
            raise Ended("EOF on stdin")

    def _on_request(self) -> None:
        data = self._connection.recv(1 << 20)
        if not data:
            raise Ended("the connection closed")
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            request = json.loads(line.decode())
            if "cancel" not in request:
                self._requests.append(request)
            elif request["cancel"] == self._running:
                self._cancelled = True
            else:
                self._requests = collections.deque(r for r in self._requests if r["id"] != request["cancel"])

    def _on_terminal(self, fd: int, take: Callable[[bytes], None]) -> None:
        try:
            take(os.read(fd, READ_BYTES))
        except BlockingIOError:
            pass
        except OSError:  # EIO: nobody has the other side open any more
            self._unwatch(fd)
            if fd in self._stale:
                self._stale.remove(fd)

    def _on_shell_input(self) -> None:
        try:
            self._to_shell = self._to_shell[os.write(self._shell.input, self._to_shell) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._to_shell = b""  # the shell ended; SIGCHLD tells
        if not self._to_shell:
            self._selector.unregister(self._shell.input)

    def _write_to_shell(self, data: bytes) -> None:
        if not self._to_shell:
            self._watch(self._shell.input, self._on_shell_input, selectors.EVENT_WRITE)
        self._to_shell += data

    # -- the shell

    def _start_shell(self) -> None:
        self._shell.start()
        terminal = self._shell.terminal
        self._watch(terminal, lambda: self._on_terminal(terminal, lambda data: None))
        # Or the end of a background job is announced in the output of some later command.
        self._write_to_shell(b"set +m\n")

    def _revive_shell(self) -> str:
        """A shell that takes commands; says so where it is a new one."""
        if self._shell.pid:
            return ""
        note = ""
        if self._shell.input >= 0:
            note = self._restart_note()
            self._drop_shell()
        self._start_shell()
        return note

    def _restart_note(self) -> str:
        text = "[the shell ended with status {} and was started again: its variables and directory are lost]\n"
        return text.format(self._shell.status)

    def _drop_shell(self) -> None:
        """Forget the shell that ended, or end it."""
        while self._shell.pid:
            os.kill(self._shell.pid, signal.SIGKILL)
            self._poll(0.05)
        if self._to_shell:
            self._selector.unregister(self._shell.input)
            self._to_shell = b""
        self._unwatch(self._shell.terminal)
        self._shell.close()

    def _bash(self, text: str, timeout_s: float) -> Dict[str, Any]:
        lost = self._revive_shell()
        spared = {(self._shell.pid, _start_ticks(self._shell.pid))}
        spared |= descendants(os.getpid(), spared) | descendants(self._shell.pid, set())
        command = Command(text, self._limit, self._last_code)
        self._watch(command.master, lambda: self._on_terminal(command.master, command.feed))
        self._write_to_shell(command.script())
        deadline = time.monotonic() + timeout_s
        while not (command.done or self._cancelled or not self._shell.pid or time.monotonic() >= deadline):
            self._poll(deadline - time.monotonic())
        timed_out, note = False, ""
        if not command.done and self._shell.pid:
            timed_out = True
            note = self._interrupt(command, spared)
        elif not command.done:
            note = self._shell_ended(command)
        self._leave(command)
        self._last_code = 130 if timed_out else command.exit_code or 0
        code = None if timed_out else command.exit_code
        output = command.output.text()
        if note:
            output += ("\n" if output and not output.endswith("\n") else "") + note
        return {"output": lost + output, "exit_code": code, "timed_out": timed_out}

    def _interrupt(self, command: Command, spared: Set[Tuple[int, int]]) -> str:
        """Kill all that the command started and bring the shell back to where it takes the next one."""
        command.muted = True
        why = "cancelled" if self._cancelled else "timed out"
        note = f"[{why}: the command's processes were killed]\n"
        give_up = time.monotonic() + INTERRUPT_S
        started = self._started_by(spared)
        while time.monotonic() < give_up and self._shell.pid and (started or not command.done):
            kill(started)
            if not command.done:
                os.kill(self._shell.pid, signal.SIGINT)
                self._write_to_shell(command.probe())
            until = time.monotonic() + 0.1
            while time.monotonic() < until and self._shell.pid and not command.done:
                self._poll(until - time.monotonic())
            self._poll(0.0)
            started = self._started_by(spared)
        kill(started)
        if not command.done:
            self._drop_shell()
            note += "[the shell did not react and was started again: its variables and directory are lost]\n"
        return note

    def _started_by(self, spared: Set[Tuple[int, int]]) -> Set[Tuple[int, int]]:
        """What runs now and did not before: children of the shell, and orphans, which are ours."""
        found = descendants(os.getpid(), spared)
        return found | descendants(self._shell.pid, spared) if self._shell.pid else found

    def _shell_ended(self, command: Command) -> str:
        """The command was ``exit`` or the like: collect what it wrote, and be ready for a new shell."""
        command.close_slave()
        until = time.monotonic() + 0.1  # something in the background may hold the terminal open
        while command.master in self._selector.get_map() and time.monotonic() < until:
            self._poll(0.01)
        command.exit_code = self._shell.status
        note = self._restart_note()
        self._drop_shell()
        return note

    def _leave(self, command: Command) -> None:
        """Its terminal stays open, unread by anyone, for what it left in the background."""
        command.close_slave()
        master = command.master
        if master not in self._selector.get_map():
            return
        self._selector.modify(master, selectors.EVENT_READ, lambda: self._on_terminal(master, lambda data: None))
        self._stale.append(master)
        if len(self._stale) > STALE_TERMINALS:
            self._unwatch(self._stale.pop(0))

    # -- calls

    def _call(self, request: Dict[str, Any]) -> Dict[str, Any]:
        tool, arguments = request["tool"], request["arguments"]
        try:
            check_call(tool, arguments)
            if tool == "bash":
                return self._bash(arguments["command"], float(request["timeout_s"]))
            action = self._files.read if tool == "read_file" else self._files.write
            return {"output": action(**arguments), "exit_code": 0}
        except Refused as error:
            return {"output": f"{error}\n", "exit_code": 2}
        except OSError as error:
            return {"error": f"{tool} failed in the sandbox: {error}"}

    def serve(self) -> NoReturn:
        self._start_shell()
        while True:
            while not self._requests:
                self._poll(60)
            request = self._requests.popleft()
            self._running, self._cancelled = request["id"], False
            began = time.monotonic()
            response = self._call(request)
            response.update(id=request["id"], seconds=time.monotonic() - began)
            self._running = None
            self._connection.sendall(json.dumps(response).encode() + b"\n")


def read_settings() -> Dict[str, Any]:
    """Stdin's first line, and not a byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("tool server: stdin ended before the settings were complete")
        line += byte
    settings: Dict[str, Any] = json.loads(line.decode())
    return settings


def end_everything() -> None:
    """Kill all descendants; new ones may appear while we look, so look until there are none."""
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        left = descendants(os.getpid(), set())
        if not left:
            return
        kill(left)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.002)
    sys.exit(f"tool server: processes are left that do not die: {sorted(left)}")


def main() -> None:
    os.closerange(3, 1024)  # what the container's start left open is not for the agent
    os.umask(0o022)
    settings = read_settings()
    become_subreaper()
    try:
        Server(settings).serve()
    except (Ended, ConnectionError):
        pass
    finally:
        end_everything()


if __name__ == "__main__":
    main()
