"""``bash`` and its companions: persistent shells, several of them by name."""

from __future__ import annotations

import re
import signal

from prorl_hpc.sandbox.tools.shell import Shell
from prorl_hpc.sandbox.tools.shell_process import shells
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, ClassVar

    from prorl_hpc.sandbox.tools.tmux_shell import TmuxShell

MAX_SHELLS = 16
MAIN = "main"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SIGNALS = ("INT", "TERM", "KILL", "HUP", "QUIT", "USR1", "USR2", "STOP", "CONT")


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {
        "bash": {"command": str, "shell": MAIN, "interactive": False, "keep": False},
        "bash_input": {"text": str, "shell": MAIN},
        "bash_interrupt": {"shell": MAIN, "signal": "INT"},
        "bash_look": {"shell": MAIN, "wait_s": 0.0},
        "bash_close": {"shell": str},
    }

    def __init__(self, host: Host) -> None:
        self._host = host
        self._candidates = shells(host)
        self._shells: dict[str, Shell | TmuxShell] = {}
        self._tmux_shells = 0

    def bash(
        self, call: Call, command: str, shell: str = MAIN, interactive: bool = False, keep: bool = False
    ) -> Generator[float, None, Answer]:
        """Run a command, up to the call's time limit; then it is killed, or left running if ``keep``. Its stdin is
        empty, or if ``interactive`` a terminal that ``bash_input`` types into."""
        if "\0" in command:
            raise Refused("the command holds a NUL byte, which no shell can take")
        return self._made(shell).run(call, command, interactive, keep)

    def bash_input(self, call: Call, text: str, shell: str = MAIN) -> Generator[float, None, Answer]:
        """Type into the interactive command that runs there; "\\n" is Enter, "\\x03" Ctrl-C, "\\x04" Ctrl-D."""
        return self._found(shell).type(call, text)

    def bash_interrupt(self, call: Call, shell: str = MAIN, signal: str = "INT") -> Generator[float, None, Answer]:
        """Signal all that the running command has started."""
        return self._found(shell).interrupt(call, _signal_number(signal))

    def bash_look(self, call: Call, shell: str = MAIN, wait_s: float = 0.0) -> Generator[float, None, Answer]:
        """What the running command wrote since the last look; after ``wait_s`` seconds, or at its end."""
        return self._found(shell).look(call, wait_s)

    def bash_close(self, call: Call, shell: str) -> Generator[float, None, Answer]:
        """End a shell with all that it started; the next command of that name starts a new one."""
        found = self._found(shell)
        del self._shells[shell]
        return found.close()

    def _made(self, name: str) -> Shell | TmuxShell:
        if name not in self._shells:
            if not _NAME.fullmatch(name):
                raise Refused(f"a shell cannot be called {name!r}: use 1 to 64 letters, digits, '.', '_' and '-'")
            if len(self._shells) >= MAX_SHELLS:
                raise Refused(
                    f"there are {MAX_SHELLS} shells already, no more can be had: {self._names()}. "
                    "Use one of these, or end one with bash_close"
                )
            self._shells[name] = self._new(name)
        return self._shells[name]

    def _new(self, name: str) -> Shell | TmuxShell:
        if self._host.settings.shell == "own":
            return Shell(self._host, name, self._candidates)
        from prorl_hpc.sandbox.tools.tmux_shell import TmuxShell

        self._tmux_shells += 1
        return TmuxShell(self._host, name, self._candidates, self._tmux_shells)

    def _found(self, name: str) -> Shell | TmuxShell:
        if name not in self._shells:
            raise Refused(f"there is no shell {name!r}; there are: {self._names() or 'none yet'}")
        return self._shells[name]

    def _names(self) -> str:
        return ", ".join(sorted(self._shells))


def _signal_number(name: str) -> int:
    if name not in _SIGNALS:
        raise Refused(f"signal {name!r} cannot be sent: use one of {', '.join(_SIGNALS)}")
    return int(signal.Signals[f"SIG{name}"])
