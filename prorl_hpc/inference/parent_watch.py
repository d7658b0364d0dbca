"""A process of an LLM server that is to end with the process that started it, however that died.

The launcher ends with its agent and takes its children along, and the agent ends what the launcher leaves; when both are
killed at once, nobody is left to do so, and vLLM's engine processes would keep the GPU's memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

_LOOK_S = 1.0


class _Watch:
    """``pid``: of the process that watches, for a forked child has only a copy of this."""

    def __init__(self) -> None:
        self.pid = 0

    def begin(self) -> None:
        """In a process that multiprocessing has started. The launcher, which it has not, is let be."""
        if self.pid == os.getpid():
            return
        if self.pid == 0:
            os.register_at_fork(after_in_child=self._forked)  # vLLM loads no plugins in a child that it forks
        self.pid = os.getpid()
        if multiprocessing.parent_process() is not None:
            self._watch(os.getppid())

    def _forked(self) -> None:
        parent, self.pid = self.pid, os.getpid()
        self._watch(parent)

    def _watch(self, parent: int) -> None:
        threading.Thread(target=_end_with, args=(parent,), name="end-with-parent", daemon=True).start()


def _end_with(parent: int) -> None:
    """PR_SET_PDEATHSIG would do so too when the thread ends that has started us, while its process lives on."""
    while os.getppid() == parent and _starter_lives():
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _starter_lives() -> bool:
    """It may have died before we began to look at our parent, which was another one then."""
    starter = multiprocessing.parent_process()
    return starter is None or starter.is_alive()


end_with_parent = _Watch().begin
