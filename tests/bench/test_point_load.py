from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from prorl_hpc.bench import point_load
from prorl_hpc.bench.point_load import Load, all_there, ordered_rows
from prorl_hpc.bench.scaling_records import LoadOrder, LoadRecord
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.store import compose
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, BatchState, WhenFull
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.rollout import NumberedResult, RolloutProgress, RolloutResult, RolloutSpec, Status
from prorl_hpc.messages.status import RunStatus, ServerStatus, TrainerStatus, WorkerStatus
from prorl_hpc.observe.process import Process
from prorl_hpc.service.client import RolloutClient

ROWS = [{"id": f"row-{n}"} for n in range(3)]


def status(workers: int = 1, servers: int = 1, *, healthy: bool = True) -> RunStatus:
    there = [WorkerStatus(f"worker-{n}", "here", "local", {"init": [1, 2], "run": [3, 4]}) for n in range(workers)]
    serving = [ServerStatus(f"inference-{n}", "here", "s", "m", healthy, 0, 2, 2, 1, 0, 0.0) for n in range(servers)]
    return RunStatus("run", time.time(), 1.0, {}, there, serving, [], 0.0)


class FakeService:
    """Ends what is ordered at once; the calls of RolloutClient that a load makes."""

    def __init__(self, state: BatchState = BatchState.DONE, said: RunStatus | None = None) -> None:
        self.rollouts: list[RolloutSpec] = []
        self.batches: list[BatchSpec] = []
        self._state, self._said = state, said or status()
        self._results: list[NumberedResult] = []

    async def submit_rollouts(self, specs: list[RolloutSpec]) -> list[RolloutProgress]:
        self.rollouts += specs
        for spec in specs:
            self._end(spec.rollout_id)
        return []

    async def submit_batch(self, spec: BatchSpec) -> None:
        self.batches.append(spec)

    async def wait_batch(self, batch_id: str) -> BatchResult:
        spec = self.batches[-1]
        self._end(f"{batch_id}.g0.s0")
        progress = BatchProgress(batch_id, self._state, spec.groups_wanted, 1, 4, 2, 0, 20, 3, 2)
        return BatchResult(progress, [], 1.0)

    async def stream(
        self, cursor: int = 0, *, follow: bool = True, trajectories: bool = True
    ) -> AsyncGenerator[NumberedResult, None]:
        assert not trajectories, "they are read from disk"
        while True:
            for numbered in self._results[cursor:]:
                cursor = numbered.cursor
                yield numbered
            if not follow:
                return
            await asyncio.sleep(0.01)

    async def status(self) -> RunStatus:
        return self._said

    def _end(self, rollout_id: str) -> None:
        result = RolloutResult(rollout_id, "", 0, "t", Status.DONE, 1.0)
        self._results.append(NumberedResult(len(self._results) + 1, result))


class UnreachableService(FakeService):
    async def status(self) -> RunStatus:
        if self.rollouts:
            raise ServiceError("the service is gone", code="unreachable", status=503)
        return await super().status()

    def _end(self, rollout_id: str) -> None:
        """Nothing ends any more."""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(point_load, "_SAMPLE_S", 0.02)
    monkeypatch.setattr(point_load, "_BATCH_SAMPLE_S", 0.02)
    words = [f"run.root={tmp_path}", "engine=scripted", "trainer.enabled=false", "run.start_timeout_s=0.1"]
    config = compose([*words, "rollout.workers_per_node=2", "engine.servers_per_node=2"])
    return Process("load-0", "trainer", RunDirectory.create(config), config, tmp_path)


async def loaded(process: Process, service: FakeService, **order: Any) -> LoadRecord:
    return await Load(process, cast(RolloutClient, service), LoadOrder(**order), ROWS).run()


async def test_a_stream_orders_the_rows_again_and_again_until_there_are_enough(process: Process) -> None:
    service = FakeService()
    record = await loaded(process, service, rollouts=1200)
    assert [spec.row["id"] for spec in service.rollouts[:4]] == ["row-0", "row-1", "row-2", "row-0"]
    assert {spec.sampling.max_tokens for spec in service.rollouts} == {process.config.task.max_turn_tokens}
    assert set(record.ended_at) == {f"load-{n}" for n in range(1200)}
    assert record.began <= min(record.ended_at.values()) <= max(record.ended_at.values()) <= record.ended
    assert record.pool_sizes == {"init": 2, "run": 4}
    assert record.samples[0].pools == {"init": 1, "run": 3}
    assert (record.samples[0].running, record.samples[0].waiting) == ({"inference-0": 2}, {"inference-0": 1})
    said = read_json(process.run.trainer_status_file, TrainerStatus)
    assert said is not None and (said.phase, said.step, said.steps) == ("done", 1200, 1200)


async def test_batches_come_one_after_the_other_each_from_where_the_last_one_left_off(process: Process) -> None:
    service = FakeService()
    order: dict[str, Any] = {"batches": 3, "groups": 4, "group_size": 2, "max_parallel_groups": 6}
    record = await loaded(process, service, **order, when_full=WhenFull.CARRY, train_s=0.05)
    assert [spec.rows[0]["id"] for spec in service.batches] == ["row-0", "row-2", "row-1"]
    assert {spec.when_full for spec in service.batches} == {WhenFull.CARRY}
    assert {spec.sampling.max_tokens for spec in service.batches} == {process.config.task.max_turn_tokens}
    assert {spec.max_parallel_groups for spec in service.batches} == {6}
    assert [note.accepted for note in record.batches] == [1, 1, 1]
    assert [note.uniform for note in record.batches] == [4, 4, 4]
    assert record.trained_s == pytest.approx(0.15)
    assert set(record.ended_at) == {f"load-{n}.g0.s0" for n in range(3)}


async def test_a_batch_that_is_not_full_ends_the_point_and_says_why(process: Process) -> None:
    with pytest.raises(
        RunError, match=r"load-0 ended exhausted with 1 of 8 groups: of 2 groups 4 were uniform and 2 brok"
    ):
        await loaded(process, FakeService(BatchState.EXHAUSTED), batches=1)


async def test_a_service_that_is_gone_ends_the_point_with_its_own_words(process: Process) -> None:
    with pytest.raises(ServiceError, match="the service is gone"):
        await loaded(process, UnreachableService(), rollouts=4)


async def test_a_point_begins_when_every_worker_and_server_of_the_plan_is_there(process: Process) -> None:
    whole = FakeService(said=status(2, 2))
    assert await all_there(cast(RolloutClient, whole), process)
    for lacking in (status(1, 2), status(2, 1), status(2, 2, healthy=False)):
        with pytest.raises(RunError, match=r"(worker|inference)-1 did not come within run\.start_timeout_s=0\.1"):
            await all_there(cast(RolloutClient, FakeService(said=lacking)), process)


def test_rows_have_an_order_of_their_own_for_each_seed() -> None:
    rows = [{"id": str(n)} for n in range(20)]
    assert ordered_rows(rows, 1) == ordered_rows(rows, 1) != ordered_rows(rows, 2)
    assert sorted(row["id"] for row in ordered_rows(rows, 1)) == sorted(row["id"] for row in rows)
