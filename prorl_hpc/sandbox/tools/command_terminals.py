"""The terminals that a shell's commands write to, one after the other."""

from __future__ import annotations

from prorl_hpc.sandbox.tools.terminal import Terminal, read_available, set_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_hpc.sandbox.tools.loop import Loop

STALE_TERMINALS = 64
"""Terminals of earlier commands that background processes still hold, at most."""
_LAST_READS = 8


class CommandTerminals:
    """At most one is in use, and serves the next command too while nothing in the background has it open."""

    def __init__(self, loop: Loop, take: Callable[[Terminal, list[bytes]], None]) -> None:
        """``take`` is given what comes from the one in use."""
        self._loop = loop
        self._take = take
        self._used: Terminal | None = None
        self._stale: list[int] = []

    def get(self) -> Terminal:
        """The one in use, or a new one."""
        if self._used is None:
            self._used = terminal = Terminal()
            self._loop.watch(terminal.master, lambda: self._ready(terminal))
        return self._used

    def clean(self) -> None:
        """Nobody but us has it: forget what was written last, and undo what the command did to its mode."""
        if self._used is None:
            return
        for _ in range(_LAST_READS):
            if not read_available(self._used.master)[0]:
                break
        set_mode(self._used.master)

    def retire(self) -> None:
        """It stays open, unread by anyone, for what was left in the background."""
        terminal, self._used = self._used, None
        if terminal is None:
            return
        terminal.let_go()
        if self._loop.watches(terminal.master):
            self._stale.append(terminal.master)
            if len(self._stale) > STALE_TERMINALS:
                self._loop.close(self._stale.pop(0))

    def close(self) -> None:
        self.retire()
        for master in self._stale:
            self._loop.close(master)
        self._stale.clear()

    def _ready(self, terminal: Terminal) -> None:
        pieces, hung_up = read_available(terminal.master)
        if terminal is self._used:
            self._take(terminal, pieces)
        if not hung_up:
            return
        self._loop.close(terminal.master)
        if terminal is self._used:
            self._used = None
            terminal.let_go()
        else:
            self._stale.remove(terminal.master)
