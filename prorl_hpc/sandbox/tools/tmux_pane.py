"""bash in a pane of tmux: typed into by ``tmux send-keys``, read from its screen by ``tmux capture-pane``.

Each has a tmux server of its own, which is our child and gets the orphans of what runs in the pane. A screen shows
what a person would see: tabs are spaces, control sequences have been obeyed, and of long output the last lines are left.
"""

from __future__ import annotations

import binascii
import os
import re
import shutil
import signal
import termios
import time

from prorl_hpc.sandbox.tools.children import Child, Collected, program
from prorl_hpc.sandbox.tools.processes import adopt_orphans, descendants, start_ticks
from prorl_hpc.sandbox.tools.shell_process import environment
from prorl_hpc.sandbox.tools.terminal import COLUMNS, ROWS
from prorl_hpc.sandbox.tools.toolset import Call, Host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator

HISTORY_LINES = 10_000
"""What tmux keeps above the screen, as OpenHands, whose shell this is like, asks of it."""
_READY_S = 15.0
_CLIENT_S = 20.0
_SOON_S = 0.02
_STATUS_S = 1.0
_FACTS = "#{cursor_x} #{history_size} #{pane_dead} #{pane_dead_status} #{pane_dead_signal}"
_DEAD = re.compile(r"\n*Pane is dead[^\n]*\s*\Z")
"""tmux's own words on the screen of a shell that ended."""
_KILLED = 137
"""The exit code of a shell of whose end tmux says no status: a signal killed it, mostly SIGKILL."""
_NO_CALL = Call(0, "tmux", 0.0, b"")
"""Nobody cancels a client of tmux: it answers in milliseconds."""


class Screen:
    """What capture-pane gave: all since the last ``begin``, as far as it is kept."""

    def __init__(self, text: str, facts: str) -> None:
        column, history, dead, status, number = (facts.split(" ") + [""] * 5)[:5]
        self.text = text.rstrip("\n")
        self.full = history.isdigit() and int(history) >= HISTORY_LINES * 9 // 10  # it drops a tenth at a time
        self.ended = dead == "1"
        self.status_known = status.isdigit() or number.isdigit()
        self.status = int(status) if status.isdigit() else 128 + int(number) if number.isdigit() else _KILLED
        if self.ended:
            self.text = _DEAD.sub("", self.text)
        if self.text and (column == "0" or self.ended):
            self.text += "\n"

    @classmethod
    def gone(cls) -> Screen:
        """Of a tmux server that is not there any more."""
        return cls("", f"0 0 1 {_KILLED}")


class TmuxPane:
    """One shell; ``number`` tells it from the other shells of the sandbox. ``argv`` starts bash."""

    def __init__(self, host: Host, number: int, argv: list[str]) -> None:
        self._host = host
        self._argv = argv
        self._env = environment(host)
        self._socket = f"{host.settings.scratch}/tmux-{number}"
        self._script = f"{host.settings.scratch}/command-{number}"
        self._key = binascii.hexlify(os.urandom(8)).decode()
        self._server: Child | None = None
        self._said = Collected(4096)
        self._tmux = ""
        self._tty = ""
        self.pid = 0
        """The shell's; 0 when there is none."""
        self.mark = re.compile(f"<{self._key}:([0-9]+):([0-9]+)>")
        """What the shell writes when it is back at its prompt: the number of the command to come, and an exit code."""

    @property
    def begun(self) -> bool:
        return self._server is not None

    def start(self) -> Generator[float, None, int]:
        """The number of its first prompt. OSError says why there is none."""
        self._tmux = shutil.which("tmux", path=self._env.get("PATH")) or ""
        if not self._tmux:
            raise OSError(
                f"sandbox.shell=tmux needs tmux in the sandbox, and there is none on its PATH ({self._env.get('PATH')}): "
                "use an image that has it (sandbox.image=host shows the node's own programs), or set sandbox.shell=own"
            )
        yield from self._start_server()
        options = ("history-limit", str(HISTORY_LINES)), ("default-terminal", "dumb"), ("remain-on-exit", "on")
        words = [word for name, value in options for word in ("set-option", "-g", name, value, ";")]
        size = ("-x", str(COLUMNS), "-y", str(ROWS), "-c", self._host.settings.root)
        # An argv, which tmux takes as one where it has more than one word; bash comes with flags.
        yield from self._asked(*words, "new-session", "-d", *size, "--", *self._argv)
        pid, self._tty = (yield from self._asked("display-message", "-p", "#{pane_pid} #{pane_tty}")).split()
        self.pid = int(pid)
        # PS1 anew before each prompt, as an activated virtual environment changes it.
        prompt = f"PROMPT_COMMAND='PS1=\"<{self._key}:\\#:\\$?>\"'"
        yield from self.begin(f"{prompt}; PS2=; unset TMUX TMUX_PANE; set +m", interactive=False)
        give_up = time.monotonic() + _READY_S
        while True:
            screen = yield from self.screen()
            if (mark := self.mark.search(screen.text)) is not None:
                return int(mark[1])
            if screen.ended or time.monotonic() > give_up:
                raise OSError(f"{self._argv[0]} does not come to its prompt in tmux: {screen.text.strip()!r}")
            yield time.monotonic() + _SOON_S

    def begin(self, text: str, *, interactive: bool) -> Generator[float, None, None]:
        """Clear the screen, and have the shell run ``text``. It is read from a file: typed, all that has several lines
        would come to several prompts, and what is not complete to none."""
        with open(self._script, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape") + b"\n")
        self._set_mode()
        stdin = "tty" if interactive else "null"
        line = f". {self._script} </dev/{stdin} >/dev/tty 2>&1"
        yield from self._client("send-keys", "-R", ";", "clear-history", ";", "send-keys", "-l", line, ";", *_ENTER)

    def screen(self) -> Generator[float, None, Screen]:
        # tmux (3.3a) sees the terminal's end before it waits for the shell, and may miss that it ended: it is told again.
        give_up = time.monotonic() + _STATUS_S
        while (screen := (yield from self._capture())).ended and not screen.status_known:
            if time.monotonic() > give_up or self._server is None or self._server.code is not None:
                break
            os.kill(self._server.pid, signal.SIGCHLD)
            yield time.monotonic() + _SOON_S
        return screen

    def _capture(self) -> Generator[float, None, Screen]:
        code, output = yield from self._client(
            "capture-pane", "-p", "-J", "-S", "-", ";", "display-message", "-p", _FACTS
        )
        if code != 0:
            return Screen.gone()
        text, _, facts = output.removesuffix("\n").rpartition("\n")
        return Screen(text, facts)

    def interrupt(self) -> Generator[float, None, None]:
        """Ctrl-C."""
        yield from self._client("send-keys", "C-c")

    def paste(self, text: str) -> Generator[float, None, None]:
        """As if it were typed, whatever characters it has."""
        given = text.encode("utf-8", "replace")
        yield from self._client(
            "load-buffer", "-b", "typed", "-", ";", "paste-buffer", "-d", "-b", "typed", stdin=given
        )

    def cwd(self) -> str:
        """The shell's directory; empty where it cannot be told."""
        try:
            return os.readlink(f"/proc/{self.pid}/cwd") if self.pid else ""
        except OSError:
            return ""

    def descendants(self, spared: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """(pid, start) of all that runs in the pane but the shell, its orphans included, without ``spared``."""
        if self._server is None or not self.pid:
            return set()
        shell = (self.pid, start_ticks(self.pid))
        orphans = descendants(self._server.pid, {*spared, shell})
        return orphans | descendants(self.pid, spared)

    def close(self) -> Generator[float, None, None]:
        """Kill it, with all that it started."""
        server, self._server, self.pid = self._server, None, 0
        if server is not None:
            yield from server.wait(_NO_CALL, 0.0)

    # -- tmux

    def _start_server(self) -> Generator[float, None, None]:
        if os.path.lexists(self._socket):
            os.unlink(self._socket)
        argv = [self._tmux, "-u", "-D", "-S", self._socket, "-f", "/dev/null"]
        become = program(argv, self._host.settings.root, self._env)

        def body() -> int:
            adopt_orphans()
            return become()

        self._said = Collected(4096)
        self._server = Child(self._host, body, self._said.add, self._said.add)
        give_up = time.monotonic() + _READY_S
        while (yield from self._client("show-options", "-g", "status"))[0] != 0:
            if self._server.code is not None or time.monotonic() > give_up:
                said = self._said.data.decode("utf-8", "replace").strip() or "it said nothing"
                yield from self.close()
                raise OSError(f"sandbox.shell=tmux: {' '.join(argv)} does not serve: {said}")
            yield time.monotonic() + _SOON_S

    def _asked(self, *words: str) -> Generator[float, None, str]:
        code, output = yield from self._client(*words)
        if code != 0:
            raise OSError(f"sandbox.shell=tmux: tmux {' '.join(words)}: {output.strip()}")
        return output

    def _client(self, *words: str, stdin: bytes = b"") -> Generator[float, None, tuple[int | None, str]]:
        """A process for each, as users of tmux pay it. Its exit code, and what it said."""
        got = bytearray()
        argv = [self._tmux, "-u", "-N", "-S", self._socket, *words]
        child = Child(self._host, program(argv, "/", self._env), got.extend, got.extend, stdin)
        code = yield from child.wait(_NO_CALL, time.monotonic() + _CLIENT_S)
        return code, got.decode("utf-8", "replace")

    def _set_mode(self) -> None:
        """The terminal as the shell is to find it, whatever the last command did to it; without echo."""
        try:
            fd = os.open(self._tty, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return  # the shell ended, and the screen will tell
        try:
            mode = termios.tcgetattr(fd)
            mode[0] = termios.ICRNL
            mode[1] = termios.OPOST | termios.ONLCR
            mode[3] = termios.ICANON | termios.ISIG | termios.IEXTEN
            termios.tcsetattr(fd, termios.TCSANOW, mode)
        finally:
            os.close(fd)


_ENTER = ("send-keys", "Enter")
