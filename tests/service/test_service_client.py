"""The clients: patience, a service that moves, and the same calls for synchronous code."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_run import FakeRun, fake_run
from fake_service import FakeService

from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError, node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchSpec, GroupFilter
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.service.sync_client import SyncRolloutClient

ROWS = [{"id": f"r{i}"} for i in range(4)]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[FakeRun]:
    async with fake_run(tmp_path) as made:
        yield made


class Refusing(FakeService):
    """Refuses the first ``times`` submissions."""

    def __init__(self, error: ServiceError, times: int) -> None:
        super().__init__()
        self.add_worker()
        self.add_own_server()
        self.error, self.times = error, times

    async def submit_rollouts(self, specs: list[RolloutSpec]):  # type: ignore[no-untyped-def]
        if self.times:
            self.times -= 1
            raise self.error
        return await super().submit_rollouts(specs)


@pytest.mark.parametrize(("code", "status"), [("queue_full", 429), ("no_servers", 503)])
async def test_a_full_service_is_asked_again(tmp_path: Path, code: str, status: int) -> None:
    service = Refusing(ServiceError("later", code=code, status=status), 1)
    async with fake_run(tmp_path, service) as run, run.client(patience_s=10) as client:
        await client.submit_rollouts([RolloutSpec("a", "t", {})])
        assert (await client.wait_rollout("a")).reward == 0.0


async def test_patience_ends_with_the_refusal_itself(tmp_path: Path) -> None:
    service = Refusing(ServiceError("full", code="queue_full", status=429), 100)
    async with fake_run(tmp_path, service) as run, run.client(patience_s=0.5) as client:
        with pytest.raises(ServiceError) as refused:
            await client.submit_rollouts([RolloutSpec("a", "t", {})])
    assert (refused.value.code, refused.value.status) == ("queue_full", 429)


async def test_what_will_not_pass_is_told_at_once(tmp_path: Path) -> None:
    service = Refusing(ServiceError("over", code="shutting_down", status=503), 100)
    async with fake_run(tmp_path, service) as run, run.client(patience_s=600) as client:
        with pytest.raises(ServiceError) as refused:
            await asyncio.wait_for(client.submit_rollouts([RolloutSpec("a", "t", {})]), 10)
    assert refused.value.code == "shutting_down"


async def test_collect_gives_the_accepted_groups(run: FakeRun) -> None:
    run.service.reward = lambda spec: 1.0 if spec.row["id"] == "r0" else float(spec.sample)
    async with run.client() as client:
        for _ in range(2):  # the same call again is the same batch
            groups = await client.collect(ROWS, groups_wanted=2, group_size=2, batch_id="b", task="t")
            assert [group.row_index for group in groups] == [1, 2]
        whole = await client.collect(
            ROWS, groups_wanted=4, group_size=1, batch_id="c", task="t", filter=GroupFilter.ALL
        )
    assert len(whole) == 4


async def test_ids_are_quoted(run: FakeRun) -> None:
    async with run.client() as client:
        for name in ("a/../b", "a?b", "a b", "ü", "%2F"):
            with pytest.raises(ServiceError) as refused:
                await client.get_rollout(name)
            assert refused.value.status == 404


@pytest.fixture
def process(tmp_path: Path) -> Process:
    run = RunDirectory(tmp_path / "run")
    run.state.mkdir(parents=True)
    return Process("trainer-0", "trainer", run, ProrlConfig(), tmp_path, node="n")


def say(process: Process, phase: Phase, socket_path: str = "") -> None:
    state = ProcessState("coordinator", "coordinator", process.node, 1, phase, endpoints={"uds": socket_path})
    write_json(process.run.process_state("coordinator"), state)


async def test_a_coordinator_that_was_started_anew_is_found(tmp_path: Path, process: Process) -> None:
    with pytest.raises(ServiceError, match="has not started"):
        RolloutClient.for_run(process)
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    async with fake_run(first) as run:
        say(process, Phase.READY, str(run.socket_path))
        client = RolloutClient.for_run(process, patience_s=30)
        assert (await client.status()).run_id == "run-1"
    say(process, Phase.STARTING)
    asking = asyncio.create_task(client.status())
    async with fake_run(second) as run:
        say(process, Phase.READY, str(run.socket_path))
        assert (await asyncio.wait_for(asking, 20)).run_id == "run-1"
    await client.close()


async def test_a_run_is_found_by_its_directory(tmp_path: Path, process: Process) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RolloutClient.for_run(process.run.path)
    process.run.config_file.touch()
    process.node = node_name()
    served = tmp_path / "served"
    served.mkdir()
    async with fake_run(served) as run:
        say(process, Phase.READY, str(run.socket_path))
        (tmp_path / "latest").symlink_to(process.run.path)
        for place in (process.run.path, str(tmp_path / "latest")):
            async with RolloutClient.for_run(place) as client:
                assert (await client.status()).run_id == "run-1"


def test_an_ended_run_is_told_to_be_resumed(process: Process) -> None:
    say(process, Phase.ENDED)
    with pytest.raises(ServiceError, match=f"is ended: .* resume {process.run.path}"):
        RolloutClient.for_run(process)


def test_an_address_without_http_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"give http://host:port"):
        RolloutClient("node:8000")


def test_the_synchronous_client_has_every_call() -> None:
    asynchronous = {
        name for name, value in vars(RolloutClient).items() if inspect.iscoroutinefunction(value) and name[0] != "_"
    }
    here = {name for name in vars(SyncRolloutClient) if not name.startswith("_")}
    assert here == asynchronous | {"stream", "for_run"}
    assert "However long" in (inspect.getdoc(vars(SyncRolloutClient)["wait_batch"]) or "")


def synchronous_session(where: str) -> list[int]:
    """What a plain script does."""
    with SyncRolloutClient(where, patience_s=5) as client:
        client.submit_batch(BatchSpec("b", "t", ROWS, 2, 2))
        assert client.wait_batch("b").progress.accepted == 2
        assert len(client.collect(ROWS, groups_wanted=1, group_size=2, batch_id="c", task="t")) == 1
        assert client.add_server(OutsideServer("o", "http://h:1/v1")).url == "http://h:1/v1"
        client.remove_server("o")
        with pytest.raises(ServiceError):
            client.get_rollout("nope")
        followed = client.stream()
        first = [next(followed).cursor for _ in range(2)]
        followed.close()
        return first + [numbered.cursor for numbered in client.stream(2, follow=False)]


async def test_a_synchronous_session(run: FakeRun) -> None:
    assert await asyncio.to_thread(synchronous_session, str(run.socket_path)) == [1, 2, 3, 4, 5, 6]
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-client"]
