"""A persistent shell by way of tmux, as ProRL-Agent's predecessor had it (to compare with): ``sandbox.shell=tmux``.

A command is typed, and then the screen is looked at, again and again, until the shell's prompt stands there: at once,
and then every ``sandbox.tmux_poll_s``, by default the 0.5 s of OpenHands' BashSession. The tools and their arguments are
those of ``Shell``; what a screen cannot give is in docs/sandboxes.md.
"""

from __future__ import annotations

import signal
import time

from prorl_hpc.sandbox.tools.output import BoundedOutput
from prorl_hpc.sandbox.tools.processes import kill, send
from prorl_hpc.sandbox.tools.tmux_pane import HISTORY_LINES, Screen, TmuxPane
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator

STOP_S = 3.0
"""How long an interrupted shell may take to be back at its prompt before it is replaced."""
_STOP_POLL_S = 0.1


class _Command:
    """One that was typed. ``exit_code`` None: it is not known to be over."""

    def __init__(self, text: str, interactive: bool) -> None:
        self.text = text
        self.interactive = interactive
        self.typed = False
        """The shell has it; the screen is its own."""
        self.kept = False
        self.exit_code: int | None = None
        self.shell_ended = False
        self.output = ""
        self.lines_lost = False
        self._told = 0

    @property
    def over(self) -> bool:
        return self.exit_code is not None

    def news(self) -> str:
        text, self._told = self.output[self._told :], len(self.output)
        return text


class TmuxShell:
    """One named shell; its tmux starts with the first command."""

    def __init__(self, host: Host, name: str, candidates: list[list[str]], number: int) -> None:
        self.name = name
        self._settings = host.settings
        self._pane = TmuxPane(host, number, candidates[0])
        self._prompt = 0
        """The number of the last prompt."""
        self._status = 0
        self._background: set[tuple[int, int]] = set()
        """What ran before the command, and is not its own."""
        self._current: _Command | None = None
        self._closed = False

    # -- what the tools do

    def run(self, call: Call, text: str, interactive: bool, keep: bool) -> Generator[float, None, Answer]:
        deadline = time.monotonic() + call.timeout_s
        if self._current is not None and (refused := (yield from self._turn(call, deadline))) is not None:
            return refused
        if self._closed:
            raise Refused(f"shell {self.name!r} was closed before this command's turn came")
        self._current = command = _Command(text, interactive)
        try:
            lost = yield from self._revive()
            self._background = self._pane.descendants(set())
            yield from self._pane.begin(text, interactive=interactive)
            command.typed = True
            yield from self._watch(call, command, deadline)
            if not command.over and keep and not call.cancelled and not self._closed:
                command.kept = True
                answer = Answer(self._text(command.news()), None, running=True)
            else:
                answer = yield from self._end(command, "cancelled" if call.cancelled else "timed out")
            answer.output = lost + str(answer.output)
            return answer
        finally:
            if not command.kept:
                self._current = None

    def look(self, call: Call, wait_s: float) -> Generator[float, None, Answer]:
        command = self._running()
        yield from self._watch(call, command, time.monotonic() + min(wait_s, call.timeout_s))
        if command.over and command.kept:
            return (yield from self._collect(command))
        return Answer(self._text(command.news()), None, running=True)

    def type(self, call: Call, text: str) -> Generator[float, None, Answer]:
        """tmux takes all of it, whether or not the command reads it."""
        command = self._running()
        if not command.interactive:
            raise Refused(
                f"the command running in shell {self.name!r} takes no input: its stdin is empty. "
                "Start it with interactive=true"
            )
        yield from self._pane.paste(text)
        return Answer("", None, running=True)

    def interrupt(self, call: Call, number: int) -> Generator[float, None, Answer]:
        """Send the signal to all that the running command started; SIGINT is also typed, as Ctrl-C."""
        command = self._running()
        give_up = time.monotonic() + min(call.timeout_s, STOP_S)
        while not command.typed and time.monotonic() < give_up:
            yield time.monotonic() + 0.01
        started = self._pane.descendants(self._background)
        send(started, number)
        if number == signal.SIGINT and command.typed:
            yield from self._pane.interrupt()
        what = f"[{signal.Signals(number).name} sent to {len(started)} processes of the command]\n"
        return Answer(what, None, running=True)

    def close(self) -> Generator[float, None, Answer]:
        """End the shell and all that it started."""
        self._closed = True
        while self._current is not None and not self._current.kept:
            yield time.monotonic() + 0.05
        yield from self._drop()
        return Answer()

    # -- the life of a command

    def _watch(self, call: Call, command: _Command, deadline: float) -> Generator[float, None, None]:
        """Look at the screen until the command is over, or the shell closed, the call cancelled or out of time."""
        yield from self._look_at(command)
        while not (command.over or call.cancelled or self._closed or time.monotonic() >= deadline):
            until = min(deadline, time.monotonic() + self._settings.tmux_poll_s)
            while not (call.cancelled or self._closed) and time.monotonic() < until:
                yield until
            yield from self._look_at(command)

    def _look_at(self, command: _Command) -> Generator[float, None, None]:
        if command.typed and not command.over:
            screen = yield from self._pane.screen()
            if not command.over:  # somebody else may have looked meanwhile
                self._read(command, screen)

    def _read(self, command: _Command, screen: Screen) -> None:
        marks = [mark for mark in self._pane.mark.finditer(screen.text) if int(mark[1]) > self._prompt]
        if marks:
            self._prompt = int(marks[-1][1])
            self._status = command.exit_code = int(marks[-1][2])
        elif screen.ended:
            command.shell_ended = True
            self._status = command.exit_code = screen.status
        command.output = self._pane.mark.sub("", screen.text[: marks[-1].start()] if marks else screen.text)
        command.lines_lost = screen.full

    def _end(self, command: _Command, why: str) -> Generator[float, None, Answer]:
        """The answer; what is not over is stopped for the reason ``why``. Leaves the shell usable, or gone."""
        text = command.news() if command.kept else command.output
        cut, note = not command.over, ""
        if self._closed:
            note = "[the shell was closed]\n"
        elif cut:
            note = f"[{why}: the command's processes were killed]\n" + (yield from self._stop(command))
        elif command.shell_ended:
            note = self._restart_note()
            yield from self._drop()
        output = self._text(text, command.lines_lost)
        output += ("\n" if note and output and not output.endswith("\n") else "") + note
        code = None if cut else command.exit_code
        return Answer(output, code, timed_out=cut and not self._closed, cwd=self._pane.cwd())

    def _stop(self, command: _Command) -> Generator[float, None, str]:
        """Kill all that the command started and bring the shell back to its prompt; what there is to say about it."""
        give_up = time.monotonic() + STOP_S
        started = self._pane.descendants(self._background)
        while time.monotonic() < give_up and (started or not command.over) and not command.shell_ended:
            kill(started)
            if not command.over:
                yield from self._pane.interrupt()
            until = time.monotonic() + (_STOP_POLL_S if not command.over else 0.01)
            while time.monotonic() < until:
                yield until
            yield from self._look_at(command)
            started = self._pane.descendants(self._background)
        if command.over and not command.shell_ended:
            return ""
        yield from self._drop()
        return "[the shell did not react and was started again: its variables and directory are lost]\n"

    def _collect(self, command: _Command) -> Generator[float, None, Answer]:
        """The end of a command that was kept."""
        try:
            return (yield from self._end(command, ""))
        finally:
            command.kept = False
            self._current = None

    def _turn(self, call: Call, deadline: float) -> Generator[float, None, Answer | None]:
        """Commands of one shell take turns. None when it is this call's turn."""
        while (current := self._current) is not None:
            if current.kept:
                yield from self._look_at(current)
            if current is not self._current:
                continue
            if current.kept and current.over:
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

    def _running(self) -> _Command:
        if self._current is None:
            raise Refused(f"nothing is running in shell {self.name!r}")
        return self._current

    def _text(self, text: str, lines_lost: bool = False) -> str:
        output = BoundedOutput(self._settings.output_limit_bytes)
        output.add(text.encode())
        note = f"[tmux keeps {HISTORY_LINES} lines: earlier ones may be lost]\n" if lines_lost else ""
        return note + output.text(self._settings.strip_ansi)

    # -- the pane

    def _revive(self) -> Generator[float, None, str]:
        """A shell that takes commands; says so where it is a new one."""
        note = ""
        if self._pane.begun and not self._pane.pid:
            yield from self._drop()
        elif self._pane.begun and (screen := (yield from self._pane.screen())).ended:
            self._status = screen.status
            yield from self._drop()
            note = self._restart_note()
        if not self._pane.begun:
            self._prompt = yield from self._pane.start()
        return note

    def _restart_note(self) -> str:
        return f"[the shell ended with status {self._status} and was started again: its variables and directory are lost]\n"

    def _drop(self) -> Generator[float, None, None]:
        yield from self._pane.close()
