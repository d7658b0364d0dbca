"""What every engine keeps, whatever is behind it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine_cases import CONTEXT, PROMPT, EngineCase, ModelReference, open_case
from waiting import until

from prorl_hpc.inference.agent import probe_gap
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan, WeightProbe, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.weight_server import WeightServer

pytestmark = pytest.mark.asyncio(loop_scope="session")
_versions = itertools.count(1)
_ids = itertools.count()
both_ways = pytest.mark.parametrize("way", ["disk", "direct"])
"""How weights reach the engine: trainer.publish."""


@pytest_asyncio.fixture(
    scope="session",
    loop_scope="session",
    params=[
        "scripted",
        pytest.param("transformers", marks=pytest.mark.train),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineCase]:
    model = Path() if request.param == "scripted" else request.getfixturevalue("tiny_model")
    async with open_case(request.param, model, tmp_path_factory.mktemp("weights")) as opened:
        yield opened


async def generate(case: EngineCase, request_id: str = "", **sampling: object) -> Completion:
    return await case.engine.generate(
        request_id or f"r{next(_ids)}",
        PROMPT,
        SamplingParams(**sampling),
        50,  # type: ignore[arg-type]
    )


async def long_one(case: EngineCase, request_id: str, wanted: int = 300) -> asyncio.Task[Completion]:
    """A generation that has begun and goes on for about ``wanted`` tokens: one whose seed meets no early end."""
    tried = await asyncio.gather(*(generate(case, seed=seed, max_tokens=wanted) for seed in range(16)))
    seed = max(range(16), key=lambda i: len(tried[i].token_ids))
    assert len(tried[seed].token_ids) > wanted / 2
    before = (await case.engine.load()).generated_tokens
    task = asyncio.create_task(generate(case, request_id, seed=seed, max_tokens=wanted))

    async def begun() -> bool:
        return (await case.engine.load()).generated_tokens >= before + 2

    await until(begun)
    return task


async def until_idle(case: EngineCase) -> None:
    async def idle() -> bool:
        load = await case.engine.load()
        return load.running + load.waiting == 0

    await until(idle)


def well_formed(completion: Completion) -> None:
    n = len(completion.token_ids)
    assert len(completion.logprobs) == n
    assert [s.start for s in completion.versions] == [0, *(s.end for s in completion.versions[:-1])][: n and None]
    assert n == 0 or completion.versions[-1].end == n


async def test_logprobs_are_the_reference_models_own(case: EngineCase) -> None:
    version = case.engine.weight_version
    answers = await asyncio.gather(*(generate(case, seed=seed, max_tokens=12) for seed in range(5)))
    for completion in answers:
        well_formed(completion)
        expected = case.reference.scores(PROMPT + completion.token_ids, version)[len(PROMPT) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert completion.versions == [VersionSpan(version, 0, len(completion.token_ids))]


async def test_prompts_of_different_lengths_do_not_disturb_each_other(case: EngineCase) -> None:
    version = case.engine.weight_version
    prompts = [PROMPT[:n] for n in (1, 7, 33, 60)]
    sampling = SamplingParams(max_tokens=6, seed=1)
    answers = await asyncio.gather(*(case.engine.generate(f"p{len(p)}", p, sampling, 50) for p in prompts))
    for prompt, completion in zip(prompts, answers, strict=True):
        expected = case.reference.scores(prompt + completion.token_ids, version)[len(prompt) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


async def test_more_long_seeded_prompts_at_once_than_one_prefill_holds(case: EngineCase) -> None:
    """Their tokens together are several times vLLM's budget for one step."""
    version = case.engine.weight_version
    prompts = [[PROMPT[(i * k + 3) % len(PROMPT)] for i in range(CONTEXT - 16)] for k in range(1, 25)]
    answers = await asyncio.gather(
        *(
            case.engine.generate(f"long{k}", prompt, SamplingParams(max_tokens=4, seed=k), 50)
            for k, prompt in enumerate(prompts)
        )
    )
    for completion in answers:
        well_formed(completion)
    expected = case.reference.scores(prompts[0] + answers[0].token_ids, version)[len(prompts[0]) - 1 :]
    assert answers[0].logprobs == pytest.approx(expected, abs=1e-4)


async def test_logprobs_are_those_of_the_distribution_sampled_from(case: EngineCase) -> None:
    if not isinstance(case.reference, ModelReference):
        pytest.skip("a scripted engine samples from no distribution")
    for temperature, top_p in ((0.7, 1.0), (1.3, 0.6), (0.0, 1.0)):
        completion = await generate(case, seed=5, max_tokens=8, temperature=temperature, top_p=top_p)
        logits = case.reference.logits(PROMPT + completion.token_ids, case.engine.weight_version)[len(PROMPT) - 1 : -1]
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        for row, token, logprob in zip(logprobs, completion.token_ids, completion.logprobs, strict=True):
            ordered = row.exp().sort(descending=True).values
            nucleus = int((ordered.cumsum(0) < top_p).sum()) + 1 if top_p < 1 else len(ordered)
            assert row[token].exp() >= ordered[nucleus - 1] - 1e-6
            assert logprob == pytest.approx(float(row[token] - ordered[:nucleus].sum().log()), abs=1e-3)
            assert temperature > 0 or token == int(row.argmax())


async def test_a_seed_repeats_and_seeds_differ(case: EngineCase) -> None:
    first, again, other = [await generate(case, seed=seed, max_tokens=16) for seed in (7, 7, 8)]
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_a_stop_token_ends_the_turn_and_belongs_to_it(case: EngineCase) -> None:
    free = await generate(case, seed=11, max_tokens=16)
    stop = free.token_ids[len(free.token_ids) // 2]
    completion = await generate(case, seed=11, max_tokens=16, stop_token_ids=[stop])
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] == stop
    assert stop not in completion.token_ids[:-1]


async def test_max_tokens_ends_the_turn(case: EngineCase) -> None:
    for seed in range(20):
        completion = await generate(case, seed=seed, max_tokens=5)
        assert len(completion.token_ids) <= 5
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(completion.token_ids) == 5
            return
    assert case.kind == "scripted"  # its replies end where they want


async def test_the_context_ends_the_turn_and_a_prompt_beyond_it_is_refused(case: EngineCase) -> None:
    if not case.has_model:
        pytest.skip("a scripted engine has no context limit")
    prompt = (PROMPT * 20)[: CONTEXT - 3]
    completion = await case.engine.generate("full", prompt, SamplingParams(max_tokens=50, seed=0), 50)
    assert len(completion.token_ids) <= 3
    with pytest.raises(InferenceError, match="max_context_tokens"):
        await case.engine.generate("over", (PROMPT * 20)[:CONTEXT], SamplingParams(), 50)


async def test_a_stop_string_ends_the_turn_and_the_tokens_up_to_it_stay(case: EngineCase) -> None:
    whole = await generate(case, seed=11, max_tokens=40)
    text = case.text.decode(whole.token_ids)
    readable = [i for i in range(4, len(text) - 2) if "\ufffd" not in text[i : i + 2]]
    stop = text[readable[len(readable) // 2] :][:2]
    end = next(n for n in range(1, 41) if stop in case.text.decode(whole.token_ids[:n]))
    cut = await generate(case, seed=11, max_tokens=40, stop=["never in there", stop])
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[:end]
    assert cut.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
    well_formed(cut)
    uncut = await generate(case, seed=11, max_tokens=40, stop=["never in there"])
    assert uncut.token_ids == whole.token_ids


async def test_a_stop_string_may_be_a_control_token(case: EngineCase) -> None:
    for seed in range(200):
        whole = await generate(case, seed=seed, max_tokens=40)
        place = next((i for i, t in enumerate(whole.token_ids[:-1]) if case.text.decode([t]) == "<|im_start|>"), None)
        if place is not None:
            cut = await generate(case, seed=seed, max_tokens=40, stop=["<|im_start|>"])
            assert cut.token_ids == whole.token_ids[: place + 1]
            return
    raise AssertionError("no turn had the control token in it: choose other seeds")


@both_ways
async def test_new_weights_forget_the_prefix_cache(case: EngineCase, way: str) -> None:
    prompt = [PROMPT[i * {"disk": 7, "direct": 11}[way] % len(PROMPT)] for i in range(200)]
    cached = []
    for update in (False, False, True, False):
        if update:
            await case.engine.update_weights(case.update(next(_versions), way=way))
        request = case.engine.generate(f"cache{next(_ids)}", prompt, SamplingParams(max_tokens=1, seed=1), 50)
        completion = await request
        assert all(span.version == case.engine.weight_version for span in completion.versions)
        cached.append(completion.cached_prompt_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] and (cached[1] > 100) is (case.kind == "vllm")


async def test_abort_returns_what_there_is(case: EngineCase) -> None:
    task = await long_one(case, "to-abort")
    await case.engine.abort("to-abort")
    completion = await task
    assert completion.finish_reason is FinishReason.ABORT
    assert 0 < len(completion.token_ids) <= 300
    well_formed(completion)
    await until_idle(case)
    await case.engine.abort("to-abort")  # nothing to do, no error


async def test_cancelling_the_coroutine_frees_the_engine(case: EngineCase) -> None:
    task = await long_one(case, "to-cancel")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await until_idle(case)


async def test_score_is_the_reference_models_own(case: EngineCase) -> None:
    version = case.engine.weight_version
    assert await case.engine.score(PROMPT) == pytest.approx(case.reference.scores(PROMPT, version), abs=1e-4)


@both_ways
async def test_new_weights_are_what_it_generates_with(case: EngineCase, way: str) -> None:
    """Catches a tied output head that keeps the old weights, and a prefix cache that keeps old keys and values."""
    await generate(case, seed=1, max_tokens=4)
    version = next(_versions)
    update = case.update(version, way=way)
    await case.engine.update_weights(update)
    assert case.engine.weight_version == version
    assert update.probe is not None
    assert await probe_gap(case.engine, update.probe) < 1e-3
    completion = await generate(case, seed=1, max_tokens=12)
    expected = case.reference.scores(PROMPT + completion.token_ids, version)[len(PROMPT) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    assert completion.versions[0].version == version


@both_ways
async def test_weights_change_under_a_request_in_flight(case: EngineCase, way: str) -> None:
    old = case.engine.weight_version
    for attempt in range(10):  # the new weights may choose an end token at once
        new = next(_versions)
        update = case.update(new, way=way)
        task = await long_one(case, f"in-flight-{way}-{attempt}")
        await case.engine.update_weights(update)
        completion = await task
        well_formed(completion)
        if len(completion.versions) == 2:
            break
        old = new
    assert [span.version for span in completion.versions] == [old, new]
    # and the next one begins from nothing that the old weights computed
    following = await generate(case, seed=2, max_tokens=8)
    expected = case.reference.scores(PROMPT + following.token_ids, new)[len(PROMPT) - 1 :]
    assert following.logprobs == pytest.approx(expected, abs=1e-4)


@both_ways
async def test_the_probe_refuses_other_weights(case: EngineCase, way: str) -> None:
    version = next(_versions)
    await case.engine.update_weights(case.update(version, way=way))
    wrong = WeightProbe(PROMPT, case.reference.scores(PROMPT, version + 1000), tolerance=0.05)
    with pytest.raises(InferenceError, match="does not serve the trainer's weights"):
        await probe_gap(case.engine, wrong)
    with pytest.raises(InferenceError):
        await probe_gap(case.engine, WeightProbe(PROMPT, [float("nan")] * (len(PROMPT) - 1), 0.05))


async def test_weights_that_cannot_be_read_are_refused_and_it_goes_on(case: EngineCase, tmp_path: Path) -> None:
    if not case.has_model:
        pytest.skip("a scripted engine reads no files")
    version = case.engine.weight_version
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not safetensors at all")
    for path in (broken, tmp_path / "absent.safetensors"):
        with pytest.raises(InferenceError):
            await case.engine.update_weights(WeightUpdate(version + 1, [str(path)]))
    assert case.engine.weight_version == version
    assert await case.engine.score(PROMPT) == pytest.approx(case.reference.scores(PROMPT, version), abs=1e-4)
    await case.engine.update_weights(case.update(next(_versions)))
    assert len((await generate(case, seed=3, max_tokens=4)).token_ids) > 0


async def test_weights_that_are_not_offered_are_refused_and_it_goes_on(case: EngineCase) -> None:
    if not case.has_model:
        pytest.skip("a scripted engine reads no weights")
    version = case.engine.weight_version
    old = case.update(version + 1, way="direct").source
    assert old is not None
    case.stream.withdraw(old)
    closed = WeightServer("127.0.0.1", b"k")
    gone = closed.offer([])
    closed.close()
    for source in (old, gone):
        with pytest.raises(InferenceError, match="cannot be had from the trainer"):
            await case.engine.update_weights(WeightUpdate(version + 1, [], source=source))
    assert case.engine.weight_version == version
    assert await case.engine.score(PROMPT) == pytest.approx(case.reference.scores(PROMPT, version), abs=1e-4)


async def test_a_burst_beyond_its_slots_is_served(case: EngineCase) -> None:
    answers = await asyncio.gather(*(generate(case, seed=seed, max_tokens=4) for seed in range(80)))
    assert all(len(a.token_ids) in range(1, 5) for a in answers)
    await until_idle(case)
