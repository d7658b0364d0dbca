"""The tool server's loop: one thread, callbacks for file descriptors, generators for what takes time.

A piece of work is a generator. ``yield deadline`` (monotonic seconds) lets go until something happened or the deadline
has passed; then it looks again whether it can go on, as one does with a condition variable. What it returns goes to
``done``. There are never more than a few pieces at a time, so all of them are woken after every event.

asyncio would do, but its import alone takes as long as the start of a container's Python, and each of its round trips
costs as much as the shell's. So it is epoll itself, too, and not ``selectors`` around it.
"""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, TypeAlias

    Work: TypeAlias = Generator[float, None, Any]

FOREVER = float("inf")
AWAKE_S = 0.0002
"""How long ``stay_awake`` looks again before it sleeps: a shell's answer takes half of that, and to be woken costs as
much again where cores rest when they have nothing to do."""
READ, WRITE = 1, 2
"""What a file descriptor is watched for."""
_EPOLL_EVENTS = {READ: select.EPOLLIN, WRITE: select.EPOLLOUT, READ | WRITE: select.EPOLLIN | select.EPOLLOUT}


class Ended(Exception):
    """The server is to end; the text says why, or is empty where the worker knows."""


class _Running:
    def __init__(self, work: Work, done: Callable[[Any, BaseException | None], None]) -> None:
        self.work = work
        self.done = done
        self.deadline = 0.0


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}
        self._running: list[_Running] = []
        self._later: list[Callable[[], None]] = []
        self._awake_until = 0.0

    def watch(self, fd: int, ready: Callable[[], None], events: int = READ) -> None:
        """Call ``ready`` whenever ``fd`` is, or hung up; replaces what was watched before."""
        if fd in self._ready:
            self._epoll.modify(fd, _EPOLL_EVENTS[events])
        else:
            self._epoll.register(fd, _EPOLL_EVENTS[events])
        self._ready[fd] = ready

    def watches(self, fd: int) -> bool:
        return fd in self._ready

    def unwatch(self, fd: int) -> None:
        if self._ready.pop(fd, None):
            self._epoll.unregister(fd)

    def close(self, fd: int) -> None:
        """Unwatch and close."""
        self.unwatch(fd)
        os.close(fd)

    def start(self, work: Work, done: Callable[[Any, BaseException | None], None]) -> None:
        """Run ``work``; ``done(result, None)`` or ``done(None, error)`` at its end, which may be before this returns."""
        running = _Running(work, done)
        if self._advance(running):
            self._running.append(running)

    def later(self, job: Callable[[], None]) -> None:
        """Call ``job`` once, when all that can go on now has gone on: for what no answer should wait for."""
        self._later.append(job)

    def stay_awake(self) -> None:
        """Something comes soon, it seems: look again for a moment before sleeping, letting others go first."""
        self._awake_until = time.monotonic() + AWAKE_S

    def run(self) -> None:
        """Until a callback raises."""
        while True:
            self._poll()

    def _poll(self) -> None:
        deadline = FOREVER
        for running in self._running:
            if running.deadline < deadline:
                deadline = running.deadline
        # epoll counts whole milliseconds, rounded up.
        timeout = None if deadline == FOREVER else max(0.0, deadline - time.monotonic())
        for fd, _ in self._look() or self._epoll.poll(timeout):
            if ready := self._ready.get(fd):  # an earlier event of this round may have closed it
                ready()
        if self._running:
            self._running, woken = [], self._running
            for running in woken:
                if self._advance(running):
                    self._running.append(running)
        if self._later:
            self._later, jobs = [], self._later
            for job in jobs:
                job()

    def _look(self) -> list[tuple[int, int]]:
        """Events, as long as it is worth staying awake for them."""
        while self._awake_until:
            if events := self._epoll.poll(0):
                return events
            if time.monotonic() >= self._awake_until:
                self._awake_until = 0.0
            os.sched_yield()
        return []

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
