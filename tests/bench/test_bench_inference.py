"""``bench inference`` without models: its arithmetic, and its way with the scripted engine and a stub of vLLM."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.bench import inference, inference_encoding, inference_gap, inference_path, inference_sticky
from prorl_hpc.bench.inference_bed import InferenceBed
from prorl_hpc.bench.inference_drift import Drift, Sampled, drifted_tokens, sample
from prorl_hpc.bench.inference_drift import figures as drift_figures
from prorl_hpc.bench.inference_sticky import Arm, EachRequestElsewhere, Load, one_arm, perfect_tokens
from prorl_hpc.bench.recorded_rollouts import Call, listing
from prorl_hpc.bench.samples import Samples
from prorl_hpc.bench.text_round_trip import TextRoundTrip, changed_tokens
from prorl_hpc.bench.vllm_door import CACHE_HITS, GENERATED, RUNNING, parse_counters
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.core.balancer import ServerBalancer
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Message, Segment, Trajectory
from prorl_hpc.tasks.testing import write_chat_model


def quiet(words: str) -> None:
    pass


def call(prompt: Sequence[int], answer: Sequence[int], cached: int = 0) -> Call:
    ids = list(answer)
    spans = [VersionSpan(0, 0, len(ids))]
    return Call(list(prompt), Completion(ids, [-0.5] * len(ids), FinishReason.STOP, spans, cached))


def rollout(*lengths: tuple[int, int], cached: Sequence[int] = ()) -> list[Call]:
    """Calls with prompts and answers of so many tokens."""
    found = itertools.zip_longest(lengths, cached, fillvalue=0)
    return [call(range(prompt), range(answer), hit) for (prompt, answer), hit in found]


def trajectory(calls: Sequence[Call]) -> Trajectory:
    """As a conversation with these calls has it."""
    segments: list[Segment] = []
    known = 0
    for made in calls:
        ids = made.completion.token_ids
        segments += [Segment(made.prompt[known:]), Segment(ids, made.completion.logprobs, True, 0)]
        known = len(made.prompt) + len(ids)
    return Trajectory(segments)


def test_perfect_stickiness_has_all_whole_blocks_of_earlier_turns() -> None:
    assert perfect_tokens([rollout((100, 10))], 32) == 0
    assert perfect_tokens([rollout((100, 10), (200, 10), (300, 10))], 32) == 96 + 192
    assert perfect_tokens([rollout((100, 28), (128, 1))], 32) == 96, "the last token of a prompt is always computed"


def test_hits_and_pace_are_held_against_perfect_stickiness_and_round_robin() -> None:
    sticky = Arm([rollout((100, 10), (200, 10), cached=(0, 96))], 2.0, hits=96, queries=300)
    robin = Arm([rollout((100, 10), (200, 10), cached=(0, 0))], 4.0)
    hits, other, pace = inference_sticky.figures([sticky], [robin], 32, "small")
    assert (hits.value, hits.goal, hits.holds) == (32.0, ">= 30", True)
    assert (other.value, other.holds) == (0.0, None)
    assert (pace.value, pace.goal, pace.holds) == (2.0, "> 1", True)
    assert inference_sticky.figures([robin], [sticky], 32, "small")[0].holds is False
    assert inference_sticky.figures([robin], [robin], 32, "small")[2].holds is False, "as fast is not faster"


def test_answers_that_contradict_the_engine_s_counters_are_no_figure() -> None:
    arm = Arm([rollout((100, 10), (200, 10), cached=(0, 96))], 2.0, hits=0, queries=300)
    with pytest.raises(RunError, match=r"32\.0 % cached prompt tokens, vLLM's counters of 0\.0 %"):
        inference_sticky.figures([arm], [arm], 32, "small")


async def test_round_robin_takes_another_server_for_each_request() -> None:
    asked: list[str] = []

    class Line:
        def __init__(self, server: ServerRef) -> None:
            self.server = server

        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            asked.append(self.server.server_id)
            return call(token_ids, [1]).completion

    class Client:
        def for_rollout(self, server: ServerRef, rollout_id: str) -> Line:
            return Line(server)

    balancer = ServerBalancer("round_robin")
    for name in ("a", "b"):
        balancer.seen(ServerRef(name, "node", f"ipc://{name}", ""), 0, healthy=True)
    llm = EachRequestElsewhere(balancer, Client(), "r")  # type: ignore[arg-type]
    for _ in range(4):
        await llm.generate([1], SamplingParams())
    assert asked == ["a", "b", "a", "b"] and balancer.assigned("a") == balancer.assigned("b") == 0


def test_every_way_to_drift_is_counted() -> None:
    calls = [call([1, 2, 3], [4, 5]), call([1, 2, 3, 4, 5, 6], [7])]
    assert drifted_tokens(calls, trajectory(calls)) == 0
    rewritten = [calls[0], call([1, 2, 3, 4, 9, 6], [7])]
    assert drifted_tokens(rewritten, trajectory(rewritten)) > 0, "the second request has not what the first one got"
    shorter = [calls[0], call([1, 2, 3, 4], [7])]
    assert drifted_tokens(shorter, trajectory(shorter)) > 0
    kept = trajectory(calls)
    other = msgspec.structs.replace(kept.segments[1], token_ids=[4, 8])
    assert drifted_tokens(calls, Trajectory([kept.segments[0], other, *kept.segments[2:]])) == 2, (
        "token and trained token"
    )
    logprob = msgspec.structs.replace(kept.segments[1], logprobs=[-0.5, -0.4])
    assert drifted_tokens(calls, Trajectory([kept.segments[0], logprob, *kept.segments[2:]])) == 1
    untrained = Segment(kept.segments[1].token_ids)
    assert drifted_tokens(calls, Trajectory([kept.segments[0], untrained, *kept.segments[2:]])) > 0


def test_text_that_merges_tokens_is_seen(tmp_path: Path) -> None:
    chat, text = ChatFormat.open(write_chat_model(tmp_path)), TextRoundTrip(tmp_path)
    asked = [Message("user", "cat a file")]
    prompt, end = chat.first_prompt(asked), chat.end_of_turn_id
    (whole,) = [chat.encode_text("file")]
    split = [i for letter in "file" for i in chat.encode_text(letter)]
    assert len(whole) < len(split)
    for answer, changed in (([*whole, end], 0), ([*split, end], 1)):
        calls = [call(prompt, answer)]
        kept = msgspec.structs.replace(trajectory(calls), messages=[*asked, Message("assistant", "not looked at")])
        drift = Drift()
        drift.add(calls, kept, chat, text)
        assert (drift.rollouts, drift.drifted, drift.text_rollouts) == (1, 0, changed)
        assert (drift.text_tokens > 0) == bool(changed)


def test_changed_tokens_are_those_outside_of_common_runs() -> None:
    assert changed_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert changed_tokens([1, 2, 3, 4], [1, 9, 4]) == 2
    assert changed_tokens([1, 2], [1, 2, 3]) == 1


def test_a_step_that_is_not_trained_reports_no_gap() -> None:
    steps = [
        {"tokens_trained": 90, "logprob_gap_mean": 1e-6, "logprob_gap_max": 1e-5},
        {"tokens_trained": 0},
        {"tokens_trained": 30, "logprob_gap_mean": 3e-6, "logprob_gap_max": 2e-5},
    ]
    worst, silent = inference_gap.figures(steps)
    assert (worst.value, worst.goal, worst.holds) == (3e-6, "< 0.001", True) and "1.0e-06, 3.0e-06" in worst.detail
    assert (silent.value, silent.holds) == (0, True)
    assert inference_gap.figures([*steps, {"tokens_trained": 5}])[1].holds is False
    with pytest.raises(RunError, match="no step was trained"):
        inference_gap.figures([{"tokens_trained": 0}])
    with pytest.raises(RunError, match="no logprob_gap_mean"):
        inference_gap.figures([{"tokens_trained": 5}])


def test_the_path_is_judged_by_its_median() -> None:
    median, p95, added = inference_path.figures(Samples([0.104] * 9 + [9.0]), Samples([0.1] * 10), "small")
    assert (median.value, median.holds, p95.holds) == (pytest.approx(1.04), True, None)
    assert added.value == pytest.approx(4.0)
    assert inference_path.figures(Samples([0.106]), Samples([0.1]), "small")[0].holds is False


def test_prompts_differ_from_their_first_block_on() -> None:
    prompts = inference_path.Prompts(500)
    first, second = prompts.next(), prompts.next()
    assert len(first) == inference_path.PROMPT_TOKENS and first[:32] != second[:32] and min(first) >= 3
    assert listing("a", 3) == listing("a", 3) != listing("b", 3)


def test_counters_are_summed_over_engines() -> None:
    metrics = (
        "# HELP x\n"
        'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n'
        'vllm:generation_tokens_total{engine="0",model_name="policy"} 7.0\n'
    )
    found = parse_counters(metrics)
    assert (found[RUNNING], found[GENERATED], found[CACHE_HITS]) == (3.0, 7.0, 0.0)


def test_agents_and_a_worker_s_client_with_the_scripted_engine(tmp_path: Path) -> None:
    """Coordinator and two inference agents of real processes: both arms, and the drift of rollouts on them."""

    async def both(bed: InferenceBed) -> tuple[Arm, Arm, Drift]:
        chat, load = ChatFormat.open(bed.model), Load(turns=2, lines=1, repetitions=1, turn_tokens=4)
        async with bed.client() as client:
            sticky = await one_arm(bed, client, [], chat, True, load, "r")
            robin = await one_arm(bed, client, [], chat, False, load, "r")
            return sticky, robin, await sample(bed, client, Sampled("scripted", 12, turns=3, turn_tokens=6), quiet)

    engine = EngineConfig(kind="scripted", servers_per_node=2)
    with InferenceBed.open(write_chat_model(tmp_path), engine, 4096, quiet) as bed:
        sticky, robin, drift = asyncio.run(both(bed))
        runtime = bed.run.path
    assert [len(arm.rollouts) for arm in (sticky, robin)] == [16, 16]
    assert [[c.prompt for c in calls] for calls in sticky.rollouts] == [
        [c.prompt for c in calls] for calls in robin.rollouts
    ], "both sides play the same rollouts"
    assert (drift.rollouts, drift.turns, drift.drifted) == (12, 36, 0)
    mismatching, rollouts, _ = drift_figures(drift, "scripted")
    assert mismatching.holds is True and rollouts.value is not None and rollouts.value > 50, "random ids are no text"
    assert not runtime.exists(), "nothing is left"


def test_the_agent_s_cpu_time_is_that_of_real_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inference_encoding, "PROMPT_TOKENS", 2000)
    main(["bench", "inference", "--quick", "--json", "--part", "encoding"])
    (figure,) = msgspec.json.decode(capsys.readouterr().out)["figures"]
    assert figure["goal"] == "< 5" and figure["value"] is not None


def test_a_missing_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path))
    assert main(["bench", "inference", "--quick", "--part", "abort"]) == 1
    assert "`prorl-hpc model prepare smollm2-135m` makes it" in capsys.readouterr().err
    assert list(inference.PARTS) == list(inference._MEASURES)
