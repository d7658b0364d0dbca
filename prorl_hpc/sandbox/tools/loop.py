"""The tool server's loop: one thread, callbacks for file descriptors, generators for what takes time.

A piece of work is a generator. ``yield deadline`` (monotonic seconds) lets go until something happened or the deadline
has passed; then it looks again whether it can go on, as one does with a condition variable. What it returns goes to
``done``. There are never more than a few pieces at a time, so all of them are woken after every event.

asyncio would do, but its import alone takes as long as the start of a container's Python, and each of its round trips
costs as much as the shell's.
"""

from __future__ import annotations

import os
import selectors
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, TypeAlias

    Work: TypeAlias = Generator[float, None, Any]

FOREVER = float("inf")


class Ended(Exception):
    """The server is to end; the text says why, or is empty where the worker knows."""


class _Running:
    def __init__(self, work: Work, done: Callable[[Any, BaseException | None], None]) -> None:
        self.work = work
        self.done = done
        self.deadline = 0.0


class Loop:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._running: list[_Running] = []

    def watch(self, fd: int, ready: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        """Call ``ready`` whenever ``fd`` is; replaces what was watched before."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, ready)
        else:
            self._selector.register(fd, events, ready)

    def watches(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def close(self, fd: int) -> None:
        """Unwatch and close."""
        self.unwatch(fd)
        os.close(fd)

    def start(self, work: Work, done: Callable[[Any, BaseException | None], None]) -> None:
        """Run ``work``; ``done(result, None)`` or ``done(None, error)`` at its end, which may be before this returns."""
        running = _Running(work, done)
        if self._advance(running):
            self._running.append(running)

    def run(self) -> None:
        """Until a callback raises."""
        while True:
            self._poll()

    def _poll(self) -> None:
        deadline = min((running.deadline for running in self._running), default=FOREVER)
        timeout = None if deadline == FOREVER else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():  # an earlier event of this round may have closed it
                key.data()
        if self._running:
            self._running, woken = [], self._running
            self._running += [running for running in woken if self._advance(running)]

    @staticmethod
    def _advance(running: _Running) -> bool:
        """Whether there is more of it."""
        try:
            running.deadline = next(running.work)
        except StopIteration as end:
            running.done(end.value, None)
            return False
        except Ended:
            raise
        except Exception as error:
            running.done(None, error)
            return False
        return True
