"""A worker that takes another LLM server for each request (rollout.balancing=round_robin_per_request)."""

from __future__ import annotations

import asyncio

import pytest
from worker_bench import PATIENCE_S, SERVER, Bench, FakeLLMs

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.core.balancer import PER_REQUEST
from prorl_hpc.messages.control import (
    MoveRun,
    RequestServers,
    ServerRef,
    ServerTrouble,
    StageFinished,
    StartRun,
    WorkerHello,
)
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.rollout import FailureKind, SamplingParams
from prorl_hpc.tasks.testing import ScriptedLLM
from prorl_hpc.worker.request_rotation import RequestRotation

A, B, C = (ServerRef(name, "node-a", "ipc:///none", "") for name in "abc")
JUDGE = ServerRef("judge-0", "node-a", "ipc:///none", "", policy="judge")


@pytest.fixture
def llms(chat: ChatFormat) -> FakeLLMs:
    return FakeLLMs(ScriptedLLM(chat, lambda prompt: "hello"))


@pytest.fixture
def rotation(llms: FakeLLMs) -> RequestRotation:
    made = RequestRotation(llms)
    made.told(RequestServers([A, B, JUDGE]))
    return made


class Troubles:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.first = asyncio.Event()

    def __call__(self, server_id: str, message: str) -> None:
        self.told.append((server_id, message))
        self.first.set()


async def ask(rotation: RequestRotation, requests: int, rollout_id: str = "r", server: ServerRef = A) -> None:
    llm = rotation.for_rollout(server, rollout_id, 50, None)
    for _ in range(requests):
        await llm.generate([1, 2], SamplingParams(max_tokens=8))


async def test_rollouts_take_the_servers_of_their_policy_in_turn(rotation: RequestRotation, llms: FakeLLMs) -> None:
    await ask(rotation, 3, "r1")
    await ask(rotation, 2, "r2")
    await ask(rotation, 2, "r3", JUDGE)
    assert llms.answered_by == ["a", "b", "a", "b", "a", "judge-0", "judge-0"]


async def test_servers_come_and_go(rotation: RequestRotation, llms: FakeLLMs) -> None:
    rotation.told(RequestServers([B, C]))
    await ask(rotation, 2)
    rotation.told(RequestServers([C]))
    await ask(rotation, 2)
    rotation.told(RequestServers([]))
    await ask(rotation, 1)
    assert llms.answered_by == ["b", "c", "c", "c", "a"], "while there is none, the one of the order to run"


async def test_what_waits_for_a_lost_server_goes_on_at_the_next(rotation: RequestRotation, llms: FakeLLMs) -> None:
    llms.down = {"a"}
    troubles = Troubles()
    llm = rotation.for_rollout(A, "r", 50, troubles)
    asking = asyncio.create_task(llm.generate([1, 2], SamplingParams(max_tokens=8)))
    await troubles.first.wait()
    rotation.told(RequestServers([B], lost="a"))
    assert (await asking).token_ids
    llm.move(C)  # the coordinator's answer to the trouble comes late
    await llm.generate([1, 2], SamplingParams(max_tokens=8))
    assert llms.answered_by == ["b", "b"]


async def test_where_runs_are_not_moved_a_lost_server_fails_its_requests(
    rotation: RequestRotation, llms: FakeLLMs
) -> None:
    llms.down = {"a"}
    with pytest.raises(InferenceError, match="a does not answer"):
        await ask(rotation, 1)
    await ask(rotation, 1)
    assert llms.answered_by == ["b"]


async def test_an_answer_to_a_trouble_moves_only_what_is_stuck(rotation: RequestRotation, llms: FakeLLMs) -> None:
    llms.down = {"a"}
    troubles = Troubles()
    llm, other = rotation.for_rollout(A, "r", 50, troubles), rotation.for_rollout(A, "r2", 50, Troubles())
    asking = asyncio.create_task(llm.generate([1, 2], SamplingParams(max_tokens=8)))
    await troubles.first.wait()
    await llm.generate([1, 2], SamplingParams(max_tokens=8))
    other.move(C)
    assert not asking.done()
    llm.move(C)
    await asking
    assert llms.answered_by == ["b", "c"]


class TestInAWorker:
    @pytest.fixture
    def config(self, config: ProrlConfig) -> ProrlConfig:
        config.rollout.balancing = PER_REQUEST
        return config

    @pytest.fixture(autouse=True)
    async def welcomed(self, bench: Bench) -> None:
        await bench.coordinator.expect(WorkerHello)
        await bench.coordinator.order(RequestServers([A, B]))

    async def test_each_turn_asks_the_next_server(self, bench: Bench) -> None:
        for rollout_id in ("r1", "r2", "r3"):
            await bench.init(rollout_id)
            assert (await bench.run(rollout_id)).failure is None
        assert bench.llms.answered_by == ["a", "b", "a"]

    async def test_a_server_that_does_not_answer_is_reported_and_left(self, bench: Bench) -> None:
        bench.llms.down = {"a"}
        await bench.init("r1")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        trouble = await bench.coordinator.expect(ServerTrouble)
        assert (trouble.rollout_id, trouble.server_id) == ("r1", "a")
        await bench.coordinator.order(MoveRun("r1", B))
        assert (await bench.coordinator.expect(StageFinished)).failure is None
        assert bench.llms.answered_by == ["b"]

    async def test_with_no_other_server_the_run_fails(self, bench: Bench) -> None:
        bench.llms.down = {"a"}
        await bench.init("r1")
        await bench.coordinator.order(StartRun("r1", SERVER, PATIENCE_S))
        await bench.coordinator.expect(ServerTrouble)
        await bench.coordinator.order(MoveRun("r1", None))
        failure = (await bench.coordinator.expect(StageFinished)).failure
        assert failure is not None and failure.kind is FailureKind.INFERENCE
