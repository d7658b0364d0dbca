"""What a rollout's LLM keeps, whichever server is behind it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from engine_cases import PROMPT
from fake_vllm import CONTEXT
from rollout_llm_cases import LLMCase, Servers
from waiting import until

from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="session")


VLLM = [pytest.mark.vllm, pytest.mark.slow]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers() -> AsyncIterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="prorl-", dir="/tmp") as directory:
        async with AsyncExitStack() as stack:
            yield Servers(Path(directory), stack)


@pytest_asyncio.fixture(
    scope="session",
    loop_scope="session",
    params=["zeromq", "http", pytest.param("vllm-zeromq", marks=VLLM), pytest.param("vllm-http", marks=VLLM)],
)
async def case(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LLMCase]:
    model = request.getfixturevalue("tiny_model") if request.param.startswith("vllm") else Path()
    yield await servers.open(request.param, model, tmp_path_factory.mktemp("scratch"))


def no_trouble(server_id: str, message: str) -> None:
    raise AssertionError(f"{server_id}: {message}")


async def generate(case: LLMCase, prompt: list[int], sampling: SamplingParams) -> Completion:
    return await case.client.for_rollout(case.ref, "r", trouble=no_trouble).generate(prompt, sampling)


async def test_ids_logprobs_and_versions_come_back(case: LLMCase) -> None:
    answers = await asyncio.gather(*(generate(case, PROMPT, SamplingParams(max_tokens=9, seed=s)) for s in range(8)))
    for completion in answers:
        n = len(completion.token_ids)
        assert 0 < n <= 9 and len(completion.logprobs) == n
        assert all(logprob <= 0 for logprob in completion.logprobs)
        assert completion.versions == [VersionSpan(case.weight_version, 0, n)]
    assert len({tuple(completion.token_ids) for completion in answers}) > 1


async def test_the_same_seed_draws_the_same(case: LLMCase) -> None:
    sampling = SamplingParams(max_tokens=12, seed=5)
    first, second = await generate(case, PROMPT, sampling), await generate(case, PROMPT, sampling)
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)


async def test_it_is_what_the_engine_itself_answers(case: LLMCase) -> None:
    if case.engine is None:
        pytest.skip("a fake has no engine behind it")
    sampling = SamplingParams(max_tokens=12, seed=6, temperature=0.7, top_p=0.9)
    ours = await generate(case, PROMPT, sampling)
    theirs = await case.engine.generate("direct", PROMPT, sampling, 50)
    assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


async def test_a_turn_may_ask_for_more_than_the_context_holds(case: LLMCase) -> None:
    prompt = [PROMPT[i % len(PROMPT)] for i in range(CONTEXT - 4)]
    completion = await generate(case, prompt, SamplingParams(max_tokens=100, seed=1))
    assert 0 < len(completion.token_ids) <= 4


async def test_a_prompt_that_is_too_long_fails_at_once_and_is_no_trouble(case: LLMCase) -> None:
    with pytest.raises(InferenceError, match="tokens"):
        await generate(case, [PROMPT[0]] * (CONTEXT + 1), SamplingParams(max_tokens=4))


async def test_a_cancelled_rollout_ends_in_the_engine_within_a_second(case: LLMCase) -> None:
    """The quickest of a few, for a machine that others use too may be late by itself."""

    async def one() -> bool:
        return await case.in_flight() >= 1

    async def idle() -> bool:
        return await case.in_flight() == 0

    took_s = []
    for i in range(8):
        task = asyncio.create_task(generate(case, [*PROMPT, i], SamplingParams(max_tokens=400, seed=i)))
        with contextlib.suppress(TimeoutError):  # it met its end at once
            await until(one, patience_s=5)
        if task.done():
            continue
        began = time.monotonic()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(idle)
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 1.0, took_s


async def test_cancelling_64_rollouts_frees_the_server(case: LLMCase) -> None:
    long = SamplingParams(max_tokens=400)
    tasks = [asyncio.create_task(generate(case, [*PROMPT, i], long)) for i in range(64)]

    async def busy() -> bool:
        return await case.in_flight() >= 8

    async def idle() -> bool:
        return await case.in_flight() == 0

    await until(busy)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert any(task.cancelled() for task in tasks)
    await until(idle)
    answer = await generate(case, PROMPT, SamplingParams(max_tokens=2, seed=1))
    assert answer.token_ids
