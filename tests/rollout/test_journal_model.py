"""Random orders, results, cancels and restarts: what the journal recovers is what a plain model of it holds."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_run import RAW, batch, ended, finished, open_journal, single

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import GroupOutcome
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.rollout import RolloutResult
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.journal_records import CarriedGroup, OpenBatch, OpenRollout
from prorl_hpc.rollout.journal_shelf import ShelfLimits

BATCHES = ("A", "B", "C")
SINGLES = ("x", "y", "A.g0")


@dataclass
class Model:
    """An epoch in plain lists."""

    orders: list[OpenBatch | OpenRollout] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    recorded: list[str] = field(default_factory=list)
    paused: bool = False

    def batch(self, name: str) -> OpenBatch | None:
        return next((o for o in self.orders if isinstance(o, OpenBatch) and o.spec.batch_id == name), None)

    def put(self, new: OpenBatch) -> None:
        self.orders = [
            new if isinstance(o, OpenBatch) and o.spec.batch_id == new.spec.batch_id else o for o in self.orders
        ]

    def full(self) -> OpenBatch | None:
        return next((o for o in self.orders if isinstance(o, OpenBatch) and o.state == "full"), None)

    def rollouts_of(self, order: OpenBatch) -> list[str]:
        own = [f"{order.spec.batch_id}.g{g}.s{s}" for g in range(2) for s in range(2)]
        return [spec.rollout_id for group in order.carried for spec in group.specs] + own


class Walk:
    """One journal and its model, step by step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.epoch = 1
        self.model = Model()
        self.everything: list[str] = []
        self.journal: Journal

    async def open(self) -> None:
        limits = ShelfLimits(file_rollouts=3)
        self.journal = await open_journal(self.directory, f"epoch-{self.epoch}", limits=limits)

    async def check(self) -> None:
        orders, paused = await self.journal.recover()
        assert (orders, paused) == (self.model.orders, self.model.paused)
        page = await self.journal.results(0, 1000, "")
        assert [n.result.rollout_id for n in page] == self.model.recorded
        assert all(n.result.trajectory.num_tokens == 5 for n in page)

    async def reopen(self, new_epoch: bool) -> None:
        await self.journal.close()
        if new_epoch:
            self.epoch += 1
            self.model = Model()
        await self.open()
        await self.check()

    async def accept_batch(self, name: str, take_over: bool) -> None:
        model = self.model
        full = model.full() if take_over else None
        if name in model.known:
            assert not await self.journal.accept_batch(batch(name))
            return
        carried: tuple[CarriedGroup, ...] = ()
        before: tuple[RolloutResult, ...] = ()
        attempts: dict[str, int] = {}
        if full is not None:
            ids = [f"{full.spec.batch_id}.g1.s0", f"{full.spec.batch_id}.g1.s1"]
            carried = (CarriedGroup(full.spec.batch_id, f"{full.spec.batch_id}.g1", 1, tuple(map(single, ids))),)
            before = tuple(r for r in (*full.before, *full.log) if r is not None and r.rollout_id in ids)
            attempts = {rollout: n for rollout, n in full.attempts.items() if rollout in ids}
        await self.journal.accept_batch(batch(name), carried, closes=full.spec.batch_id if full else "")
        model.known.add(name)
        model.orders = [order for order in model.orders if order is not full]
        model.orders.append(OpenBatch(batch(name), carried, before, (), attempts, "running"))

    async def accept_rollout(self, name: str) -> None:
        assert await self.journal.accept_rollouts([single(name)]) == [name not in self.model.known]
        if name not in self.model.known:
            self.model.known.add(name)
            self.model.orders.append(OpenRollout(single(name), 1))

    async def note(self, pick: int, attempt: int) -> None:
        order = self.model.orders[pick % len(self.model.orders)] if self.model.orders else None
        if isinstance(order, OpenRollout):
            self.journal.note_attempt(order.spec.rollout_id, attempt)
            new = replace(order, attempt=max(order.attempt, attempt))
            self.model.orders = [new if o is order else o for o in self.model.orders]
        elif order is not None:
            waiting = [r for r in self.model.rollouts_of(order) if r not in self.model.recorded]
            if waiting:
                rollout = waiting[pick % len(waiting)]
                self.journal.note_attempt(rollout, attempt)
                attempts = {**order.attempts, rollout: max(attempt, order.attempts.get(rollout, 0))}
                self.model.put(replace(order, attempts=attempts))

    async def record(self, pick: int) -> None:
        order = self.model.orders[pick % len(self.model.orders)] if self.model.orders else None
        if order is None:
            return
        if isinstance(order, OpenRollout):
            rollout, name = order.spec.rollout_id, ""
            self.model.orders.remove(order)
        else:
            waiting = [r for r in self.model.rollouts_of(order) if r not in self.model.recorded]
            if not waiting:
                return
            rollout, name = waiting[pick % len(waiting)], order.spec.batch_id
            attempts = {r: n for r, n in order.attempts.items() if r != rollout}
            self.model.put(replace(order, log=(*order.log, ended(rollout)), attempts=attempts))
        self.model.recorded.append(rollout)
        self.everything.append(f"{self.epoch}:{rollout}")
        await self.journal.record(ended(rollout), RAW, name)

    async def cancel(self, name: str) -> None:
        order = self.model.batch(name)
        if order is not None:
            await self.journal.cancelled_batch(name)
            self.model.put(replace(order, log=(*order.log, None)))

    async def finish(self, name: str, keeps_open: bool) -> None:
        order = self.model.batch(name)
        if order is None or order.state != "running" or (keeps_open and self.model.full() is not None):
            return
        results = [r for r in (*order.before, *order.log) if r is not None]
        carried = [r for r in results if keeps_open and r.group_id == f"{name}.g1"]
        rest = [r for r in results if r not in carried]
        result = finished(name, {0: rest})
        groups = [*result.groups, *finished(name, {1: carried}, GroupOutcome.CARRIED).groups]
        await self.journal.finish_batch(msgspec.structs.replace(result, groups=groups), keeps_open=keeps_open)
        if keeps_open:
            self.model.put(replace(order, state="full"))
        else:
            self.model.orders.remove(order)

    async def hand_over(self, name: str, following: str, records: int) -> None:
        """What ``accept_batch`` and ``finish`` seldom come to by chance."""
        await self.accept_batch(name, True)
        order = self.model.batch(name)
        if order is not None and following not in self.model.known:
            index = self.model.orders.index(order)
            for pick in range(records):
                await self.record(index + pick * len(self.model.orders))
            await self.finish(name, True)
            await self.note(index, 3)
            await self.accept_batch(following, True)
            await self.check()

    async def pause(self, on: bool) -> None:
        await self.journal.set_paused(on)
        self.model.paused = on

    async def refuse(self, name: str) -> None:
        if name in self.model.known:
            with pytest.raises(ServiceError):
                await self.journal.accept_batch(batch(name, rows=7))


def _step(walk: Walk, step: tuple[Any, ...]) -> Coroutine[Any, Any, None]:
    name, *arguments = step
    done: Coroutine[Any, Any, None] = getattr(walk, name)(*arguments)
    return done


picks, flags = st.integers(0, 20), st.booleans()
steps = st.one_of(
    st.tuples(st.just("accept_batch"), st.sampled_from(BATCHES), flags),
    st.tuples(st.just("accept_rollout"), st.sampled_from(SINGLES)),
    st.tuples(st.just("note"), picks, st.integers(2, 4)),
    st.tuples(st.just("record"), picks),
    st.tuples(st.just("record"), picks),
    st.tuples(st.just("cancel"), st.sampled_from(BATCHES)),
    st.tuples(st.just("finish"), st.sampled_from(BATCHES), flags),
    st.tuples(st.just("hand_over"), st.sampled_from(BATCHES), st.sampled_from(BATCHES), st.integers(0, 4)),
    st.tuples(st.just("check")),
    st.tuples(st.just("pause"), flags),
    st.tuples(st.just("refuse"), st.sampled_from(BATCHES)),
    st.tuples(st.just("reopen"), st.sampled_from((False, False, True))),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, min_size=5, max_size=40))
def test_recover_gives_what_a_plain_model_holds(sequence: list[tuple[Any, ...]]) -> None:
    async def walk_all(directory: Path) -> None:
        walk = Walk(directory)
        await walk.open()
        for step in sequence:
            await _step(walk, step)
        await walk.check()
        await walk.reopen(False)
        await walk.journal.close()
        stored = read_rollouts(RunDirectory(directory), ["rollout_id", "cursor"])
        assert sorted(stored["rollout_id"].to_pylist()) == sorted(name.partition(":")[2] for name in walk.everything)
        assert sorted(stored["cursor"].to_pylist()) == list(range(1, len(walk.everything) + 1))

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(walk_all(Path(directory)))
