"""Batches of rollouts in the order in which they are trained on, made ahead of the trainer as far as it allows.

One batch generates at a time, for the prompts that it used up say where the next one begins. The batch of step s is ordered
when that of step s−1 has all its groups and step s−1−lead is trained and its weights are served: its oldest token is of the
weights with which step s−lead begins. With ``lead`` 0 a batch is ordered when it is asked for and not before, so that
nothing else is generated during an evaluation.

What is ordered depends on step and cursor alone. Who begins again at an earlier position, with batches ahead of it made or
under way, orders the same ones by the same names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from prorl_hpc.messages.batch import BatchResult
from prorl_hpc.trainer.orders import Ordered

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of optimizer step ``step``; ``cursor``: the data's when that step is done."""

    step: int
    cursor: int
    result: BatchResult
    has_head_start: bool


class RolloutsAhead:
    """``order(step, cursor)`` makes the batch of a step. Use as a context manager: what is under way at its end is given
    up here, and goes on in the service, where it can be asked for again."""

    def __init__(
        self, order: Callable[[int, int], Awaitable[Ordered]], *, lead: int, step: int, cursor: int, steps: int
    ) -> None:
        """``step``: the last one that is trained; ``steps``: of the whole run."""
        self._order, self._lead, self._steps = order, lead, steps
        self._step, self._cursor = step, cursor
        self._allowed = step
        """The last step whose batch may be ordered."""
        self._permission = asyncio.Event()
        self._made: asyncio.Queue[StepRollouts | BaseException] = asyncio.Queue()
        self._asked = step
        self._producer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RolloutsAhead:
        self._producer = asyncio.create_task(self._produce())
        self.trained(self._step)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._producer is not None
        self._producer.cancel()
        await asyncio.gather(self._producer, return_exceptions=True)
        while not self._made.empty():
            left = self._made.get_nowait()
            if isinstance(left, BaseException) and left is not error:
                log.error("rollouts ahead of training failed too: %s", left)

    async def next(self) -> StepRollouts:
        """The batch of the next step, waited for. Raises what went wrong when it was made; batches made before come first."""
        self._asked += 1
        self._allow(self._asked + self._lead)
        made = await self._made.get()
        if isinstance(made, BaseException):
            raise made
        return made

    def trained(self, step: int) -> None:
        """The weights of step ``step`` are served, or it left them as they were."""
        if self._lead:
            self._allow(step + 1 + self._lead)

    def _allow(self, step: int) -> None:
        self._allowed = max(self._allowed, step)
        self._permission.set()

    async def _produce(self) -> None:
        try:
            for step in range(self._step + 1, self._steps + 1):
                while step > self._allowed:
                    self._permission.clear()
                    await self._permission.wait()
                ordered = await self._order(step, self._cursor)
                self._cursor += ordered.result.progress.rows_used
                self._made.put_nowait(StepRollouts(step, self._cursor, ordered.result, ordered.has_head_start))
        except Exception as error:
            self._made.put_nowait(error)  # told to whoever asks for this batch
