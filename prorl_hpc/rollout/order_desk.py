"""Orders in, results out, nothing forgotten: the half of the rollout service that clients order from.

What happens is written to the journal in the order in which it happens; what a client is told, and what a worker may
forget, is on disk before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.core.events import Cancel, Ended, Event, Retried, Submit, Wake
from prorl_hpc.core.groups import Moves
from prorl_hpc.core.policy_choice import PolicyChoice
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.rollout import Budgets, NumberedResult, RolloutProgress, RolloutResult, RolloutSpec, Status
from prorl_hpc.rollout.admission import Admission
from prorl_hpc.rollout.dispatch import Clock, Dispatch
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.journal_orders import batch_of
from prorl_hpc.rollout.metrics import CoordinatorMetrics
from prorl_hpc.rollout.orders import Orders, Over
from prorl_hpc.rollout.outbox import Outbox
from prorl_hpc.rollout.policy_figures import PolicyFigures
from prorl_hpc.rollout.publications import Publications
from prorl_hpc.rollout.run_status import Rate
from prorl_hpc.rollout.waiters import Waiters
from prorl_hpc.service.errors import conflict, not_found


class OrderDesk:
    """Batches and rollouts of service.protocol.RolloutService."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        journal: Journal,
        outbox: Outbox,
        publications: Publications,
        metrics: CoordinatorMetrics,
        clock: Clock,
        choice: PolicyChoice,
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        journal.on_commit = metrics.journal_committed
        self._orders = Orders(
            Budgets(config.init_s, config.run_s, config.eval_s, config.total_s, config.wall_s), choice
        )
        self._dispatch = Dispatch(
            run_id,
            config,
            outbox,
            publications,
            on_ended=self._ended,
            on_retried=self._retried,
            clock=clock,
        )
        self._scheduler = self._dispatch.scheduler
        self._admission = Admission(self._scheduler, self._dispatch.agents, choice)
        self._rate = Rate()
        self._figures = PolicyFigures(choice.names)
        self._waiters = Waiters()
        self._accepting = asyncio.Lock()

    # batches

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        async with self._accepting:
            progress = await self._known_batch(spec.batch_id)
            if progress is not None:
                await self._journal.accept_batch(spec)  # the same, or refused
                self._wake(spec.batch_id)
                return progress
            parallel = spec.max_parallel_groups or spec.groups_wanted
            self._admission.check(spec.group_size * parallel, {spec.policy})
            # Nothing may refuse it any more once it has the groups of another.
            await self._journal.require_free(spec.batch_id)
            closes, carried, before = self._orders.take_over(spec)
            await self._journal.accept_batch(spec, carried, closes)
            moves, over = self._orders.begin_batch(spec, self._clock(), carried, before)
            self._wake(spec.batch_id)
        self._make(moves)
        if over is not None:
            self._finish(over)
        return await self.batch_progress(spec.batch_id)

    async def batch_progress(self, batch_id: str) -> BatchProgress:
        progress = await self._known_batch(batch_id)
        if progress is None:
            raise not_found("batch", batch_id)
        return progress

    async def wait_batch(self, batch_id: str, wait_s: float) -> BatchResult | BatchProgress:
        if self._orders.running(batch_id) is not None:
            self._wake(batch_id)
            await self._waiters.wait(("batch", batch_id), wait_s)
        return await self._journal.batch_result(batch_id) or await self.batch_progress(batch_id)

    async def cancel_batch(self, batch_id: str) -> BatchProgress:
        if self._orders.running(batch_id) is not None:
            self._wake(batch_id)
            noted = self._journal.cancelled_batch(batch_id)
            moves, over = self._orders.cancel_batch(batch_id, self._clock())
            self._make(moves)
            if over is not None:
                self._finish(over)
            await noted
        progress = await self.batch_progress(batch_id)
        if progress.state not in ("running", "cancelled"):
            message = f"batch {batch_id!r} is over ({progress.state}): there is nothing to cancel"
            raise conflict(message, "already_finished", state=progress.state)
        return progress

    async def list_batches(self, after: str, limit: int) -> list[BatchProgress]:
        return [await self.batch_progress(batch_id) for batch_id in await self._journal.batches(after, limit)]

    async def _known_batch(self, batch_id: str) -> BatchProgress | None:
        running = self._orders.running(batch_id)
        if running is not None:
            return running.progress()
        return await self._journal.batch_state(batch_id)

    # single rollouts

    async def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        refusal = self._admission.why_not(len(specs), {spec.policy for spec in specs})
        if refusal is not None:
            # Said again, they are known, whatever would be refused now.
            known = [await self._known_rollout(spec.rollout_id) for spec in specs]
            if None in known:
                raise refusal
        if any(batch_of(spec.rollout_id) for spec in specs):
            async with self._accepting:  # a batch whose rollouts would have such ids
                new = await self._journal.accept_rollouts(specs)
        else:
            new = await self._journal.accept_rollouts(specs)
        begun = [spec for spec, is_new in zip(specs, new, strict=True) if is_new]
        self._make(self._orders.begin_rollouts(begun))
        return [await self.rollout_progress(spec.rollout_id) for spec in specs]

    async def rollout_progress(self, rollout_id: str) -> RolloutProgress:
        progress = await self._known_rollout(rollout_id)
        if progress is None:
            raise not_found("rollout", rollout_id)
        return progress

    async def wait_rollout(self, rollout_id: str, wait_s: float) -> RolloutResult | RolloutProgress:
        if self._scheduler.life(rollout_id) is not None:
            await self._waiters.wait(("rollout", rollout_id), wait_s)
        if self._scheduler.life(rollout_id) is None:
            result = await self._journal.rollout_result(rollout_id)
            if result is not None:
                return result
        return await self.rollout_progress(rollout_id)

    async def cancel_rollout(self, rollout_id: str) -> RolloutProgress:
        self._dispatch.tell(Cancel((rollout_id,)))
        progress = await self.rollout_progress(rollout_id)
        if progress.status is not Status.CANCELLED:
            message = f"rollout {rollout_id!r} is over ({progress.status}): there is nothing to cancel"
            raise conflict(message, "already_finished", status=progress.status)
        return progress

    async def list_rollouts(
        self, status: Status | None, batch_id: str, policy: str, after: str, limit: int
    ) -> list[RolloutProgress]:
        listed: list[RolloutProgress] = []
        begun = not after or self._scheduler.life(after) is None
        if status is None or not status.terminal:
            skipping = not begun
            for life in self._scheduler.lives if not after or skipping else ():
                if skipping:
                    skipping = life.spec.rollout_id != after
                elif (
                    status in (None, life.status)
                    and policy in ("", life.spec.policy)
                    and batch_id in ("", self._orders.batch_of(life.spec.rollout_id))
                ):
                    listed.append(self._living(life.spec.rollout_id))
                if len(listed) == limit:
                    return listed
        if status is None or status.terminal:
            listed += await self._journal.ended(status, batch_id, policy, after if begun else "", limit - len(listed))
        return listed

    async def results(self, cursor: int, limit: int, wait_s: float, batch_id: str, policy: str) -> list[NumberedResult]:
        end = self._clock() + wait_s
        if batch_id and wait_s > 0:
            self._wake(batch_id)
        await self._journal.wait_beyond(cursor, wait_s)
        while True:
            newest = self._journal.newest_cursor
            found = await self._journal.results(cursor, limit, batch_id, policy)
            if found or self._clock() >= end:
                return found
            await self._journal.wait_beyond(max(newest, cursor), end - self._clock())

    async def _known_rollout(self, rollout_id: str) -> RolloutProgress | None:
        if self._scheduler.life(rollout_id) is not None:
            return self._living(rollout_id)
        return await self._journal.rollout_progress(rollout_id)

    def _living(self, rollout_id: str) -> RolloutProgress:
        life = self._scheduler.life(rollout_id)
        assert life is not None
        batch_id = self._orders.batch_of(rollout_id)
        return RolloutProgress(
            rollout_id, life.status, life.tries, life.worker, life.server, batch_id, life.spec.policy
        )

    # what happens

    def _ended(self, ended: Ended, now: float) -> Iterable[Event]:
        result = ended.result
        self._rate.count(now)
        self._metrics.ended(result)
        self._figures.count(result)
        batch_id, moves, over = self._orders.ended(result, now)

        def on_disk(recorded: asyncio.Future[int]) -> None:
            if not recorded.cancelled() and recorded.exception() is None:
                self._dispatch.on_disk(result.worker, ended.attempt_id)
                self._waiters.wake(("rollout", result.rollout_id))

        self._journal.record(result, ended.trajectory, batch_id).add_done_callback(on_disk)
        if over is not None:
            self._finish(over)
        self._metrics.accepted(len(moves.submit))
        return events_of(moves)

    def _retried(self, retried: Retried) -> None:
        self._metrics.retried()
        self._journal.note_attempt(retried.rollout_id, retried.attempt, retried.spared)

    def _wake(self, batch_id: str) -> None:
        """Somebody asks for a batch that an earlier attempt of the run has left."""
        asleep = self._orders.wake(batch_id)
        if asleep:
            self._journal.woken(batch_id)
            self._dispatch.tell(Wake(asleep))

    def _finish(self, over: Over) -> None:
        batch_id = over.result.progress.batch_id
        finished = self._journal.finish_batch(over.result, keeps_open=over.carries_on)
        finished.add_done_callback(lambda _: self._waiters.wake(("batch", batch_id)))

    def _make(self, moves: Moves) -> None:
        self._metrics.accepted(len(moves.submit))
        self._dispatch.tell(*events_of(moves))


def events_of(moves: Moves) -> list[Event]:
    """What the scheduler is to be told."""
    submit: list[Event] = [Submit(moves.submit)] if moves.submit else []
    cancel: list[Event] = [Cancel(moves.cancel)] if moves.cancel else []
    return submit + cancel
