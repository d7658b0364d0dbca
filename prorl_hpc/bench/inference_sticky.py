"""One server for a rollout's whole RUN, the one with the fewest, against the next server for every request."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import InferenceBed, small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.recorded_rollouts import Call, RecordingLLM, at_once, play
from prorl_hpc.bench.vllm_door import CACHE_HITS, CACHE_QUERIES, VllmDoor
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.core.balancer import ServerBalancer
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.tasks.protocol import LLM

MODEL, ROLLOUTS, SERVERS = "smollm2-135m", 16, 2
_ALLOWED_POINTS = 2.0
_POLICY = "policy"


@dataclass(frozen=True)
class Load:
    """``lines``: of each message that comes between turns, some 20 tokens a line."""

    turns: int
    lines: int
    repetitions: int
    turn_tokens: int = 16


@dataclass(frozen=True)
class Arm:
    """What came of all rollouts of one side, once; ``hits`` and ``queries`` are the engines' own counts, in tokens."""

    rollouts: list[list[Call]]
    seconds: float
    hits: float = 0.0
    queries: float = 0.0

    @property
    def turns_per_s(self) -> float:
        return sum(map(len, self.rollouts)) / self.seconds


def cached_tokens(rollouts: Sequence[Sequence[Call]]) -> int:
    return sum(call.completion.cached_prompt_tokens for calls in rollouts for call in calls)


def prompt_tokens(rollouts: Sequence[Sequence[Call]]) -> int:
    return sum(len(call.prompt) for calls in rollouts for call in calls)


def perfect_tokens(rollouts: Sequence[Sequence[Call]], block_size: int) -> int:
    """Prompt tokens that a cache has which holds all that each rollout sent and got before, in whole blocks; an engine
    computes at least the last one."""
    return sum(
        min(len(before.prompt) + len(before.completion.token_ids), len(call.prompt) - 1) // block_size * block_size
        for calls in rollouts
        for before, call in itertools.pairwise(calls)
    )


class EachRequestElsewhere:
    """A rollout's LLM that takes for every request the server whose turn it is."""

    def __init__(self, balancer: ServerBalancer, client: LLMClient, rollout_id: str) -> None:
        self._balancer, self._client, self._rollout_id = balancer, client, rollout_id
        self._numbers = itertools.count()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        name = f"{self._rollout_id}/{next(self._numbers)}"
        server = _assigned(self._balancer, name)
        try:
            return await self._client.for_rollout(server, self._rollout_id).generate(token_ids, sampling)
        finally:
            self._balancer.release(name)


def _assigned(balancer: ServerBalancer, name: str) -> ServerRef:
    server = balancer.assign(name, _POLICY)
    assert server is not None, "all servers are healthy"
    return server


def _balancer(balancing: str, servers: Sequence[ServerRef]) -> ServerBalancer:
    balancer = ServerBalancer(balancing)
    for server in servers:
        balancer.seen(server, 0, healthy=True)
    return balancer


async def play_all(
    bed: InferenceBed, chat: ChatFormat, llm_of: Callable[[str], LLM], load: Load, name: str
) -> list[list[Call]]:
    """All rollouts at once; the same ``name``, the same texts and seeds."""

    async def rollout(number: int) -> list[Call]:
        llm = RecordingLLM(llm_of(f"{name}-{number}"))
        conversation = TokenConversation(
            chat,
            llm,
            SamplingParams(seed=1),
            max_context_tokens=bed.max_context_tokens,
            max_turn_tokens=load.turn_tokens,
            seed_scope=f"{name}-{number}",
        )
        await play(conversation, f"{name}-{number}", load.turns, load.lines)
        return llm.calls

    return await at_once(rollout(number) for number in range(ROLLOUTS))


async def one_arm(
    bed: InferenceBed,
    client: LLMClient,
    doors: Sequence[VllmDoor],
    chat: ChatFormat,
    sticky: bool,
    load: Load,
    name: str,
) -> Arm:
    """With empty caches. ``doors``: none for an engine that counts no hits."""
    for door in doors:
        await door.forget()
    balancer = _balancer("least_in_flight" if sticky else "round_robin", bed.servers)

    def llm_of(rollout_id: str) -> LLM:
        if sticky:
            return client.for_rollout(_assigned(balancer, rollout_id), rollout_id)
        return EachRequestElsewhere(balancer, client, rollout_id)

    before = [await door.counters() for door in doors]
    began = time.monotonic()
    rollouts = await play_all(bed, chat, llm_of, load, name)
    seconds = time.monotonic() - began
    after = [await door.counters() for door in doors]

    def counted(counter: str) -> float:
        return sum(b[counter] - a[counter] for a, b in zip(before, after, strict=True))

    return Arm(rollouts, seconds, counted(CACHE_HITS), counted(CACHE_QUERIES))


def figures(sticky: Sequence[Arm], robin: Sequence[Arm], block_size: int, model: str) -> list[Figure]:
    """Of as many arms of one side as of the other. RunError if the engine's answers and counters disagree."""
    ours = [calls for arm in sticky for calls in arm.rollouts]
    theirs = [calls for arm in robin for calls in arm.rollouts]
    asked = prompt_tokens(ours)
    perfect = 100 * perfect_tokens(ours, block_size) / asked
    rate, other = 100 * cached_tokens(ours) / asked, 100 * cached_tokens(theirs) / prompt_tokens(theirs)
    counted = 100 * sum(arm.hits for arm in sticky) / max(1.0, sum(arm.queries for arm in sticky))
    if abs(counted - rate) > 1.0:
        raise RunError(f"the answers tell of {rate:.1f} % cached prompt tokens, vLLM's counters of {counted:.1f} %")
    how = (
        f"{model}, {SERVERS} servers, {len(sticky)} times {ROLLOUTS} rollouts, {sum(map(len, ours))} turns, "
        f"{asked} prompt tokens; vLLM's own counters say {counted:.1f} %, perfect stickiness has {perfect:.1f} %"
    )
    speed = [a.turns_per_s / b.turns_per_s for a, b in zip(sticky, robin, strict=True)]
    pace = ", ".join(f"{a.turns_per_s:.2f}/s : {b.turns_per_s:.2f}/s" for a, b in zip(sticky, robin, strict=True))
    return [
        Figure.at_least(
            "prefix-cache hits, sticky least-in-flight",
            rate,
            round(perfect - _ALLOWED_POINTS, 2),
            "%",
            "perfect stickiness less 2 points",
            how,
        ),
        Figure.told("prefix-cache hits, round-robin per request", other, "%"),
        Figure.above("turns per second", statistics.median(speed), 1.0, "x", "round-robin per request", pace),
    ]


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError without the model, ConfigError without vLLM."""
    load = Load(turns=3, lines=4, repetitions=1) if quick else Load(turns=6, lines=6, repetitions=3)
    engine = EngineConfig(kind="vllm", servers_per_node=SERVERS, kv_cache_mib=1536)
    with InferenceBed.open(small_model(MODEL), engine, 2048, say) as bed:
        return asyncio.run(_measure(bed, load, say))


async def _measure(bed: InferenceBed, load: Load, say: Say) -> list[Figure]:
    chat = ChatFormat.open(bed.model)
    arms: dict[bool, list[Arm]] = {True: [], False: []}
    async with bed.client() as client, bed.doors() as doors:
        await one_arm(bed, client, doors, chat, True, Load(1, 1, 1), "warm-up")
        for repetition in range(load.repetitions):
            for sticky in (True, False) if repetition % 2 == 0 else (False, True):
                arm = await one_arm(bed, client, doors, chat, sticky, load, f"r{repetition}")
                arms[sticky].append(arm)
                kind = "sticky" if sticky else "round-robin"
                say(f"{repetition + 1} of {load.repetitions}, {kind}: {arm.turns_per_s:.2f} turns/s")
        block_size = await doors[0].block_size()
    return figures(arms[True], arms[False], block_size, bed.model.name)
