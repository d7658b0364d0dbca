"""Whether the tokens that are trained on are those that the engine read and wrote, over many sampled rollouts; and what
a conversation kept as text would have made of the same ones."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import InferenceBed, small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.recorded_rollouts import Call, RecordingLLM, at_once, play
from prorl_hpc.bench.text_round_trip import TextRoundTrip, changed_tokens
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Trajectory

_CONTEXT_TOKENS = 2048
_LINES = 2


@dataclass(frozen=True)
class Sampled:
    """``turns`` of at most ``turn_tokens`` tokens each."""

    model: str
    rollouts: int
    turns: int = 4
    turn_tokens: int = 32
    at_once: int = 64


@dataclass
class Drift:
    """Sums over rollouts. ``drifted``: tokens that are not the engine's; ``text_*``: what text would have changed."""

    rollouts: int = 0
    turns: int = 0
    tokens: int = 0
    generated: int = 0
    drifted: int = 0
    text_rollouts: int = 0
    text_tokens: int = 0

    def add(self, calls: Sequence[Call], trajectory: Trajectory, chat: ChatFormat, text: TextRoundTrip) -> None:
        """RunError if the engine was never asked."""
        if not calls:
            raise RunError("a rollout ended without a request to the engine")
        self.rollouts += 1
        self.turns += len(calls)
        self.tokens += trajectory.num_tokens
        self.generated += trajectory.num_trained_tokens
        self.drifted += drifted_tokens(calls, trajectory)
        turns = [call.completion.token_ids for call in calls]
        ours = calls[-1].prompt + turns[-1]
        if ours[-1] in chat.stop_token_ids:
            ours = ours[:-1]
        theirs = text.ids(trajectory.messages, turns)
        self.text_rollouts += ours != theirs
        self.text_tokens += changed_tokens(ours, theirs)


def drifted_tokens(calls: Sequence[Call], trajectory: Trajectory) -> int:
    """Tokens at which a rollout departs from what the engine was sent and has answered: each request must begin with the
    one before and its answer, the trajectory must be the last of them, and what is trained the answers and their
    logprobs."""
    found = 0
    for before, call in itertools.pairwise(calls):
        known = before.prompt + before.completion.token_ids
        found += _differing(known, call.prompt[: len(known)])
    found += _differing(calls[-1].prompt + calls[-1].completion.token_ids, trajectory.token_ids)
    by_token = zip(trajectory.token_ids, trajectory.logprobs, trajectory.loss_mask, strict=True)
    trained = [(token, logprob) for token, logprob, mask in by_token if mask]
    answered = [
        pair for call in calls for pair in zip(call.completion.token_ids, call.completion.logprobs, strict=True)
    ]
    return found + _differing(answered, trained)


def _differing(expected: Sequence[object], got: Sequence[object]) -> int:
    return sum(a != b for a, b in zip(expected, got, strict=False)) + abs(len(expected) - len(got))


async def sample(bed: InferenceBed, client: LLMClient, plan: Sampled, say: Say) -> Drift:
    """At temperature 1, as rollouts are."""
    chat, text, drift = ChatFormat.open(bed.model), TextRoundTrip(bed.model), Drift()
    places = asyncio.Semaphore(plan.at_once)

    async def rollout(number: int) -> None:
        name = f"drift-{number}"
        async with places:
            llm = RecordingLLM(client.for_rollout(bed.servers[number % len(bed.servers)], name))
            conversation = TokenConversation(
                chat,
                llm,
                SamplingParams(temperature=1.0, seed=1),
                max_context_tokens=bed.max_context_tokens,
                max_turn_tokens=plan.turn_tokens,
                seed_scope=name,
            )
            await play(conversation, name, plan.turns, _LINES)
            drift.add(llm.calls, conversation.trajectory, chat, text)
        if drift.rollouts % max(1, plan.rollouts // 10) == 0:
            say(f"{drift.rollouts} of {plan.rollouts} rollouts, {drift.drifted} tokens drifted")

    await at_once(rollout(number) for number in range(plan.rollouts))
    return drift


def figures(drift: Drift, model: str) -> list[Figure]:
    how = (
        f"{model}: {drift.rollouts} rollouts sampled at temperature 1, {drift.turns} turns, {drift.tokens} tokens, "
        f"{drift.generated} of them generated"
    )
    text = "the same rollouts kept as text"
    changed = f"{drift.text_tokens} of {drift.tokens}, {drift.generated} of which are generated"
    return [
        Figure.exactly(
            f"{model}: mismatching tokens", drift.drifted, 0, "tokens", "what the engine read and wrote", how
        ),
        Figure.told(f"{model}: rollouts that text changes", 100 * drift.text_rollouts / drift.rollouts, "%", text),
        Figure.told(f"{model}: tokens that text changes", 100 * drift.text_tokens / drift.tokens, "%", text, changed),
    ]


def measure(quick: bool, say: Say) -> list[Figure]:
    """``quick``: the tiny model alone. RunError without the models, ConfigError without vLLM."""
    found = []
    full = [Sampled("tiny", 1000), Sampled("smollm2-135m", 100, at_once=16)]
    for plan in [Sampled("tiny", 100)] if quick else full:
        engine = EngineConfig(kind="vllm", kv_cache_mib=1024)
        with InferenceBed.open(small_model(plan.model), engine, _CONTEXT_TOKENS, say) as bed:
            found += figures(asyncio.run(_measure(bed, plan, say)), plan.model)
    return found


async def _measure(bed: InferenceBed, plan: Sampled, say: Say) -> Drift:
    async with bed.client() as client:
        return await sample(bed, client, plan, say)
