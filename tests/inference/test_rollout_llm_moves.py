"""A rollout moves between LLM servers: those of the run over real ZeroMQ, and one outside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_site import ENDLESS, Site, endless, open_site
from fake_vllm import GARBAGE, OutsideFake, serve_outside
from msgspec.structs import replace
from waiting import until

from prorl_hpc.inference.client import LLMClient
from prorl_hpc.inference.protocol import ServerDown
from prorl_hpc.inference.rollout_llm import RolloutLLM
from prorl_hpc.inference.scripted_engine import Reply, ScriptedEngine
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.keys import RunKeys

SHORT = SamplingParams(max_tokens=8)


class Restarting(ScriptedEngine):
    """``trouble``: what it says while it is being started again, as vLLM after a death."""

    trouble = ""

    def _check_alive(self) -> None:
        if self.trouble:
            raise ServerDown(self.trouble)
        super()._check_alive()


class Bench:
    """Servers and one worker; ``troubles`` are what it told."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self.keys = RunKeys.create(directory / "keys")
        self.client = LLMClient("here", self.keys, "worker-0", ping_s=0.05, lost_after_s=0.5, move_wait_s=20)
        self.troubles: list[tuple[str, str]] = []
        self._stack = stack

    async def server(self, name: str, reply: Any = endless) -> Site[Restarting]:
        engine = Restarting(reply, token_s=0.001)
        return await self._stack.enter_async_context(open_site(self.directory, engine, name=name, keys=self.keys))

    async def outside(self, *modes: str) -> tuple[OutsideFake, ServerRef]:
        fake = await self._stack.enter_async_context(serve_outside(self.directory / "outside.sock", *modes))
        return fake, ServerRef("outside", "elsewhere", "", "", url=fake.url, weight_version=7)

    def rollout(self, ref: ServerRef) -> RolloutLLM:
        return self.client.for_rollout(ref, "r", trouble=lambda *told: self.troubles.append(told))

    async def told(self, count: int) -> None:
        await until(lambda: len(self.troubles) == count)


@pytest.fixture
async def bench(socket_dir: Path) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        made = Bench(socket_dir, stack)
        yield made
        await made.client.close()


def start(llm: RolloutLLM, prompt: list[int] | None = None, sampling: SamplingParams = ENDLESS) -> Any:
    return asyncio.create_task(llm.generate(prompt or [1, 2], sampling))


def counting(*ids: int) -> Reply:
    return lambda token_ids, sampling: list(ids)


async def test_a_move_in_the_middle_of_a_turn_goes_on_elsewhere(bench: Bench) -> None:
    seen: list[tuple[list[int], SamplingParams]] = []

    def reply(token_ids: Any, sampling: SamplingParams) -> Any:
        seen.append((list(token_ids), sampling))
        return [7, 8]

    old, new = await bench.server("a"), await bench.server("b", reply)
    llm, sampling = bench.rollout(old.ref), SamplingParams(max_tokens=10**6, seed=3)
    task = start(llm, [1, 2, 3], sampling)
    await until(lambda: old.in_engine() == 1)
    llm.move(new.ref)
    assert (await task).token_ids == [7, 8]
    assert seen == [([1, 2, 3], sampling)]
    await until(lambda: old.in_engine() == 0)
    assert (await llm.generate([4], SHORT)).token_ids == [7, 8]  # and it stays there
    assert bench.troubles == []


async def test_a_move_between_turns_costs_nothing(bench: Bench) -> None:
    old, new = await bench.server("a", counting(1)), await bench.server("b", counting(2))
    llm = bench.rollout(old.ref)
    assert (await llm.generate([1], SHORT)).token_ids == [1]
    llm.move(new.ref)
    assert (await llm.generate([1], SHORT)).token_ids == [2]


async def test_a_move_to_the_server_it_has_changes_nothing(bench: Bench) -> None:
    server = await bench.server("a")
    llm = bench.rollout(server.ref)
    task = start(llm)
    await until(lambda: server.in_engine() == 1)
    request = set(server.engine._running)
    llm.move(server.ref)
    llm.move(ServerRef("a", "here", server.ref.ipc, server.ref.tcp))
    await asyncio.sleep(0.05)
    assert set(server.engine._running) == request and not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("how", ["killed", "stopped", "engine down"])
async def test_a_server_that_dies_is_told_once_and_left(bench: Bench, how: str) -> None:
    old, new = await bench.server("a"), await bench.server("b", counting(7))
    llm = bench.rollout(old.ref)
    tasks = [start(llm), start(llm, [3])]
    await until(lambda: old.in_engine() == 2)
    if how == "killed":
        await old.die()
    elif how == "stopped":
        old.stop.set()
    else:
        old.engine.trouble = "CUDA error in layer 3"
    await bench.told(1)
    llm.move(new.ref)
    assert [answer.token_ids for answer in await asyncio.gather(*tasks)] == [[7], [7]]
    ((server_id, message),) = bench.troubles
    assert server_id == "a"
    assert {"killed": "pings", "stopped": "being stopped", "engine down": "layer 3"}[how] in message


async def test_both_servers_die_one_after_the_other(bench: Bench) -> None:
    first, second = await bench.server("a"), await bench.server("b")
    llm = bench.rollout(first.ref)
    task = start(llm)
    await until(lambda: first.in_engine() == 1)
    first.engine.trouble = "first words"
    await bench.told(1)
    llm.move(second.ref)
    await until(lambda: second.in_engine() == 1)
    second.engine.trouble = "second words"
    await bench.told(2)
    llm.move(None)
    with pytest.raises(InferenceError, match="first words"):
        await task
    assert [server_id for server_id, _ in bench.troubles] == ["a", "b"]
    with pytest.raises(InferenceError, match="no other takes over"):
        await llm.generate([1], SHORT)


async def test_no_server_at_all_fails_what_is_in_flight(bench: Bench) -> None:
    server = await bench.server("a")
    llm = bench.rollout(server.ref)
    task = start(llm)
    await until(lambda: server.in_engine() == 1)
    llm.move(None)
    with pytest.raises(InferenceError, match="no other takes over"):
        await task
    await until(lambda: server.in_engine() == 0)


@pytest.mark.parametrize(
    "ref", [ServerRef("far", "another-node", "ipc:///nowhere", ""), ServerRef("far", "", "", "", url="ftp://far")]
)
async def test_a_server_that_cannot_be_reached_from_here_fails_it(bench: Bench, ref: ServerRef) -> None:
    server = await bench.server("a")
    llm = bench.rollout(server.ref)
    task = start(llm)
    await until(lambda: server.in_engine() == 1)
    llm.move(ref)
    with pytest.raises(InferenceError, match="cannot move to LLM server far"):
        await task
    llm.move(server.ref)
    task = start(llm)
    await until(lambda: server.in_engine() == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_a_word_from_the_coordinator_it_fails_in_the_end(bench: Bench) -> None:
    bench.client._move_wait_s = 0.05
    server = await bench.server("a")
    server.engine.trouble = "its last words"
    with pytest.raises(InferenceError, match=r"its last words.*within 0.05 s"):
        await bench.rollout(server.ref).generate([1], ENDLESS)


async def test_without_somebody_to_tell_it_fails_at_once(bench: Bench) -> None:
    server = await bench.server("a")
    server.engine.trouble = "its last words"
    with pytest.raises(InferenceError, match="its last words"):
        await bench.client.for_rollout(server.ref, "r").generate([1], ENDLESS)


async def test_a_refused_request_is_no_trouble(bench: Bench) -> None:
    def reply(token_ids: Any, sampling: SamplingParams) -> Any:
        raise InferenceError("the prompt is too long")

    server = await bench.server("a", reply)
    with pytest.raises(InferenceError, match="too long"):
        await bench.rollout(server.ref).generate([1], SHORT)
    assert bench.troubles == []


async def test_an_agent_cancelled_while_it_waits_leaves_nothing_behind(bench: Bench) -> None:
    server, other = await bench.server("a"), await bench.server("b")
    llm = bench.rollout(server.ref)
    server.engine.trouble = "broken"
    await bench.client.for_rollout(other.ref, "warm").generate([1], SHORT)
    before = asyncio.all_tasks()
    task = start(llm)
    await bench.told(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    llm.move(other.ref)
    await asyncio.sleep(0.05)
    assert other.in_engine() == 0
    assert {left for left in asyncio.all_tasks() - before if "heartbeat" not in repr(left)} == set()


async def test_a_request_that_breaks_every_server_is_not_carried_on_for_ever(bench: Bench) -> None:
    servers = [await bench.server(name) for name in ("a", "b")]
    for server in servers:
        server.engine.trouble = f"{server.ref.server_id} fell over it"
    refs = {"a": servers[1].ref, "b": servers[0].ref}
    told: list[str] = []

    def trouble(server_id: str, message: str) -> None:
        told.append(server_id)
        llm.move(refs[server_id])

    llm = bench.client.for_rollout(servers[0].ref, "r", trouble=trouble)
    with pytest.raises(InferenceError, match=r"a fell over it.*3"):
        await llm.generate([666], ENDLESS)
    assert told == ["a", "b"]


async def test_a_server_started_anew_has_forgotten_and_may_be_asked_again(bench: Bench) -> None:
    old = await bench.server("a")
    llm = bench.rollout(old.ref)
    task = start(llm)
    await until(lambda: old.in_engine() == 1)
    await asyncio.sleep(0.2)  # pings tell which instance it is
    await old.die()
    new = await bench.server("a", counting(9))
    await bench.told(1)
    assert "started anew" in bench.troubles[0][1] or "pings" in bench.troubles[0][1]
    llm.move(new.ref)
    assert (await task).token_ids == [9]


async def test_a_lost_line_is_ended_and_another_takes_its_place(bench: Bench) -> None:
    server = await bench.server("a")
    llm = bench.rollout(server.ref)
    task = start(llm)
    await until(lambda: server.in_engine() == 1)
    await server.die()
    await bench.told(1)
    (lost,) = bench.client._lines.values()
    llm.move(None)
    await asyncio.gather(task, return_exceptions=True)
    revived = await bench.server("a", counting(9))
    assert (await bench.rollout(revived.ref).generate([1], SHORT)).token_ids == [9]
    await until(lambda: all(work.done() for work in lost._tasks))
    assert lost not in bench.client._lines.values()


async def test_moved_to_a_server_outside_and_back(bench: Bench) -> None:
    server = await bench.server("a")
    fake, ref = await bench.outside()
    llm = bench.rollout(server.ref)
    task = start(llm, [1, 2], SamplingParams(max_tokens=10**6, seed=4))
    await until(lambda: server.in_engine() == 1)
    llm.move(ref)
    completion: Completion = await task
    n = len(completion.token_ids)
    assert n == 510 and completion.versions == [VersionSpan(7, 0, n)]
    assert (fake.bodies[0]["prompt"], fake.bodies[0]["seed"], fake.bodies[0]["model"]) == ([1, 2], 4, "policy")
    task = start(llm)
    await until(lambda: len(fake.in_flight) == 1)
    llm.move(server.ref)
    await until(lambda: not fake.in_flight and server.in_engine() == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.troubles == []


async def test_an_outside_server_that_breaks_off_is_left(bench: Bench) -> None:
    server = await bench.server("a", counting(7))
    fake, ref = await bench.outside("busy")
    llm = bench.rollout(ref)
    task = start(llm)
    await until(lambda: len(fake.in_flight) == 1)
    await fake.stop()
    await bench.told(1)
    llm.move(server.ref)
    assert (await task).token_ids == [7]


@pytest.mark.parametrize("mode", ["silent", "broken", "key"])
async def test_an_outside_server_that_does_not_serve_is_left(bench: Bench, mode: str) -> None:
    server = await bench.server("a", counting(7))
    _, ref = await bench.outside(mode)
    llm = bench.rollout(ref)
    task = start(llm)
    await bench.told(1)
    expected = {"silent": "has not answered for 0.5 s", "broken": "answers 500", "key": "answers 401"}[mode]
    assert expected in bench.troubles[0][1]
    llm.move(server.ref)
    assert (await task).token_ids == [7]


@pytest.mark.parametrize("mode", ["no-ids", "no-logprobs", "other-logprobs", "other-prompt", *GARBAGE])
async def test_an_outside_server_that_answers_garbage_is_left_and_none_of_it_is_kept(bench: Bench, mode: str) -> None:
    server = await bench.server("a", counting(7))
    _, ref = await bench.outside(mode)
    llm = bench.rollout(replace(ref, vocab_size=1000))
    task = start(llm, sampling=SHORT)
    await bench.told(1)
    assert bench.troubles[0][0] == "outside" and "LLM server outside at unix:" in bench.troubles[0][1]
    llm.move(server.ref)
    assert (await task).token_ids == [7]


async def test_a_busy_outside_server_is_waited_for(bench: Bench) -> None:
    _, ref = await bench.outside()
    completion = await bench.rollout(ref).generate([1], SamplingParams(max_tokens=511))
    assert len(completion.token_ids) == 511
    assert bench.troubles == []
