"""A persistent shell, and what runs in it.

A command writes to a terminal that no process of an earlier command has open: what was left in the background can
never appear in a later command's output. An interactive one has the shell's own terminal, and shares it with what
earlier interactive ones left.
"""

from __future__ import annotations

import binascii
import os
import signal
import time

from prorl_hpc.sandbox.tools.command import INTERRUPTED, LONGEST_MARK, Command, Marks
from prorl_hpc.sandbox.tools.command_terminals import CommandTerminals
from prorl_hpc.sandbox.tools.processes import kill, send
from prorl_hpc.sandbox.tools.shell_process import ShellProcess
from prorl_hpc.sandbox.tools.terminal import Terminal, read_available, set_mode
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator

FALLBACK_S = 0.005
"""A command that takes longer may have lost its mark; most are over by then."""
INTERRUPT_S = 3.0
"""How long an interrupted shell may take to be usable again before it is replaced."""
DRAIN_S = 0.1
"""How long the output of a shell that ended is waited for, where something in the background holds the terminal."""


class Shell:
    """One named shell; its process starts with the first command."""

    def __init__(self, host: Host, name: str, candidates: list[list[str]]) -> None:
        self.name = name
        self._loop = host.loop
        self._settings = host.settings
        self._process = ShellProcess(host, candidates)
        self._marks = Marks(binascii.hexlify(os.urandom(8)).decode())
        self._terminals = CommandTerminals(host.loop, self._take)
        self._spared: set[tuple[int, int]] | None = set()
        """What ran before the command, and is not its own; None when that is yet to be looked up."""
        self._last_code = 0
        self._heard = b""
        self._current: Command | None = None
        self._closed = False

    # -- what the tools do

    def run(self, call: Call, text: str, interactive: bool, keep: bool) -> Generator[float, None, Answer]:
        deadline = time.monotonic() + call.timeout_s
        if self._current is not None and (refused := (yield from self._turn(call, deadline))) is not None:
            return refused
        if self._closed:
            raise Refused(f"shell {self.name!r} was closed before this command's turn came")
        self._current = command = Command(
            text, self._marks, None if interactive else self._free_terminal(), self._settings.output_limit_bytes
        )
        try:
            lost = yield from self._carry_out(call, command, deadline)
            if command.done:
                answer = self._end(command)
            elif keep and not call.cancelled and not self._over(command):
                command.kept = True
                answer = Answer(self._text(command, news=True), None, running=True)
            else:
                why = "" if self._over(command) else "cancelled" if call.cancelled else "timed out"
                answer = yield from self._cut(command, why)
            if lost:
                answer.output = lost + str(answer.output)
            return answer
        finally:
            if not command.kept:
                self._current = None

    def look(self, call: Call, wait_s: float) -> Generator[float, None, Answer]:
        command = self._running()
        until = time.monotonic() + min(wait_s, call.timeout_s)
        while not (self._over(command) or call.cancelled or time.monotonic() >= until):
            yield until
        if self._over(command) and command.kept:
            return (yield from self._collect(command))
        return Answer(self._text(command, news=True), None, running=True)

    def type(self, call: Call, text: str) -> Generator[float, None, Answer]:
        """Into the running command's terminal, as far as it takes it within the call's time."""
        command = self._running()
        if not command.interactive:
            raise Refused(
                f"the command running in shell {self.name!r} takes no input: its stdin is empty. "
                "Start it with interactive=true"
            )
        left = text.encode("utf-8", "replace")
        deadline = time.monotonic() + call.timeout_s
        while left and not self._over(command):
            try:
                left = left[os.write(self._process.terminal, left) :]
            except BlockingIOError:
                if call.cancelled or time.monotonic() >= deadline:
                    note = f"[it does not read: {len(left)} bytes of the text were not taken]\n"
                    return Answer(note, None, timed_out=True, running=True)
                yield min(deadline, time.monotonic() + 0.02)
        return Answer("", None, running=True)

    def interrupt(self, call: Call, number: int) -> Generator[float, None, Answer]:
        """Send the signal to all that the running command started, and the shell itself SIGINT."""
        command = self._running()
        give_up = time.monotonic() + min(call.timeout_s, INTERRUPT_S)
        while not (taken := self._taken(command)) and not call.cancelled and time.monotonic() < give_up:
            yield min(give_up, time.monotonic() + 0.01)
            if self._over(command):
                return Answer("[the command ended before it could be interrupted]\n")
        started = self._started()
        send(started, number)
        if number == signal.SIGINT and taken:
            self._process.signal(number)
            self._process.write(command.probe())
        what = f"[{signal.Signals(number).name} sent to {len(started)} processes of the command]\n"
        return Answer(what, None, running=True)

    def close(self) -> Generator[float, None, Answer]:
        """End the shell and all that it started."""
        self._closed = True
        while self._process.pid:
            started = self._process.descendants(set())
            self._process.signal(signal.SIGKILL)
            kill(started)
            yield time.monotonic() + 0.05
        while self._current is not None and not self._current.kept:
            yield time.monotonic() + 0.05
        if self._process.begun:
            self._process.close()
        self._terminals.close()
        return Answer()

    # -- the life of a command

    def _carry_out(self, call: Call, command: Command, deadline: float) -> Generator[float, None, str]:
        """Have the shell run it, until it is over, cancelled or out of time; says so where that is a new shell."""
        lost = "" if self._process.pid else (yield from self._revive())
        for again in (True, False):
            size = self._begin(command)
            fall_back = time.monotonic() + FALLBACK_S
            while not (self._over(command) or call.cancelled or (now := time.monotonic()) >= deadline):
                if now >= fall_back and not command.has_fallback:
                    self._process.write(command.fallback())
                yield deadline if command.has_fallback else min(deadline, fall_back)
            if not (self._over(command) or command.has_fallback):
                self._process.write(command.fallback())
            # A shell may be about to end, by what an earlier command left in it, when it is given the next.
            if self._process.pid or command.done or self._closed or self._process.unread_bytes < size or not again:
                break
            lost = yield from self._revive()
        if command.done:
            self._process.answered()
        return lost

    def _turn(self, call: Call, deadline: float) -> Generator[float, None, Answer | None]:
        """Commands of one shell take turns. None when it is this call's turn."""
        while (current := self._current) is not None:
            if current.kept and self._over(current):
                yield from self._collect(current)
                continue
            what = f"shell {self.name!r} still runs {current.text[:80]!r}"
            if current.kept:
                raise Refused(
                    f"{what}: look at it with bash_look, answer it with bash_input, end it with bash_interrupt, "
                    "or use another shell"
                )
            if call.cancelled:
                return Answer("[cancelled before it began]\n", None, timed_out=True)
            if time.monotonic() >= deadline:
                return Answer(f"[timed out before it began: {what}]\n", None, timed_out=True)
            yield deadline
        return None

    def _begin(self, command: Command) -> int:
        """How many bytes the shell was given to read."""
        self._settle()
        if command.interactive:  # each begins with a terminal as it should be
            set_mode(self._process.terminal, typed=True)
        script = command.script(self._last_code)
        self._process.write(script)
        return len(script)

    def _over(self, command: Command) -> bool:
        return command.done or not self._process.pid

    def _running(self) -> Command:
        if self._current is None:
            raise Refused(f"nothing is running in shell {self.name!r}")
        return self._current

    def _collect(self, command: Command) -> Generator[float, None, Answer]:
        """The end of a command that was kept."""
        command.kept = False
        try:
            return self._end(command, news=True) if command.done else (yield from self._cut(command, "", news=True))
        finally:
            self._current = None

    def _cut(self, command: Command, why: str, *, news: bool = False) -> Generator[float, None, Answer]:
        """End a command that is not done: ``why`` it has to be stopped, else the shell has ended. Leaves the shell
        usable, or gone."""
        note = yield from (self._stop(command, why) if why else self._shell_ended(command))
        if why:
            command.exit_code = None
        answer = self._end(command, news=news, cut_short=bool(why))
        output = str(answer.output)
        answer.output = output + ("\n" if output and not output.endswith("\n") else "") + note
        answer.timed_out = bool(why)
        return answer

    def _end(self, command: Command, *, news: bool = False, cut_short: bool = False) -> Answer:
        """Its terminal serves again if nobody else can have it; that is looked up once the answer is on its way."""
        self._last_code = INTERRUPTED if cut_short else command.exit_code or 0
        self._spared = None
        if cut_short or not self._process.pid:
            self._terminals.retire()
        self._loop.later(self._settle)
        return Answer(self._text(command, news=news), command.exit_code, cwd=command.cwd)

    def _text(self, command: Command, *, news: bool) -> str:
        output = command.news() if news else command.output
        return output.text(self._settings.strip_ansi)

    def _stop(self, command: Command, why: str) -> Generator[float, None, str]:
        """Kill all that the command started and bring the shell back to where it takes the next one."""
        command.muted = True
        note = f"[{why}: the command's processes were killed]\n"
        give_up = time.monotonic() + INTERRUPT_S
        started = self._started()
        while time.monotonic() < give_up and self._process.pid and (started or not command.done):
            kill(started)
            if not command.done and self._taken(command):
                self._process.signal(signal.SIGINT)
                self._process.write(command.probe())
            until = time.monotonic() + 0.1
            while time.monotonic() < until and not self._over(command):
                yield until
            yield 0.0
            started = self._started()
        if not command.done:
            yield from self._drop(started)
            note += "[the shell did not react and was started again: its variables and directory are lost]\n"
        return note

    def _taken(self, command: Command) -> bool:
        """Whether the shell has read all of it. An interrupt before that would make it forget what it has read so far,
        and run the rest as a command."""
        return not self._process.pid or self._process.unread_bytes <= command.following_bytes

    def _started(self) -> set[tuple[int, int]]:
        """What the running command has started."""
        return self._process.descendants(self._spared or set())

    def _shell_ended(self, command: Command) -> Generator[float, None, str]:
        """The command was ``exit`` or the like: collect what it wrote, and be ready for a new shell."""
        if command.terminal is not None:
            command.terminal.let_go()
        master = command.terminal.master if command.terminal else self._process.terminal
        until = time.monotonic() + DRAIN_S
        while self._loop.watches(master) and time.monotonic() < until:
            yield until
        command.exit_code = self._process.status
        if self._closed:
            return "[the shell was closed]\n"
        note = self._restart_note()
        yield from self._drop(set())
        return note

    # -- the process

    def _revive(self) -> Generator[float, None, str]:
        """A shell that takes commands; says so where it is a new one."""
        note = ""
        if self._process.begun:
            note = "" if self._process.try_another() else self._restart_note()
            yield from self._drop(set())
        self._process.start()
        self._loop.watch(self._process.terminal, self._on_own_terminal)
        # Or the end of a background job is announced in the output of some later command.
        self._process.write(b"set +m\n")
        return note

    def _restart_note(self) -> str:
        text = "[the shell ended with status {} and was started again: its variables and directory are lost]\n"
        return text.format(self._process.status)

    def _drop(self, started: set[tuple[int, int]]) -> Generator[float, None, None]:
        """Forget the shell that ended, or end it with what the command has ``started``."""
        while self._process.pid:
            self._process.signal(signal.SIGKILL)
            kill(started)
            yield time.monotonic() + 0.05
        self._process.close()
        self._spared = set()

    # -- terminals

    def _free_terminal(self) -> Terminal:
        self._settle()
        return self._terminals.get()

    def _settle(self) -> None:
        """Between two commands: note what goes on in the background, which may have the last command's terminal."""
        if self._spared is not None or self._closed:
            return
        self._spared = set() if self._process.pid and self._process.alone else self._process.descendants(set())
        if self._spared:
            self._terminals.retire()
        else:
            self._terminals.clean()

    def _take(self, terminal: Terminal, pieces: list[bytes]) -> None:
        command = self._current
        if command is not None and command.terminal is terminal:
            for data in pieces:
                command.feed(data)

    def _on_own_terminal(self) -> None:
        pieces, hung_up = read_available(self._process.terminal)
        command = self._current
        if command is not None:
            for data in pieces:
                if command.interactive:
                    command.feed(data)
                else:
                    self._hear(command, data)
        if hung_up:
            self._loop.unwatch(self._process.terminal)

    def _hear(self, command: Command, data: bytes) -> None:
        """Among what the shell writes to its own terminal: that it is back at its prompt."""
        self._heard = (self._heard + data)[-LONGEST_MARK:]
        if (mark := self._marks.last(self._heard)) is not None:
            self._heard = b""
            if command.lost_its_mark(*mark):
                self._process.write(command.probe())
