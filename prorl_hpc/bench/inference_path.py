"""What the way through our processes adds to a request: worker → ZeroMQ → agent → Unix socket → vLLM."""

from __future__ import annotations

import asyncio
import json
import random
import time

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import InferenceBed, small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.samples import Samples, in_turns
from prorl_hpc.bench.vllm_door import VllmDoor
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.tasks.protocol import LLM

MODEL = "tiny"
"""The model that takes least, so that the way weighs most."""
PROMPT_TOKENS = 4096
_CONTEXT_TOKENS = PROMPT_TOKENS + 64
_TURN = 5
_GOAL = 1.05
_DIRECT = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1, "logprobs": 0, "detokenize": False}


class Prompts:
    """Random ids, so that no two prompts share a block of the prefix cache."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary, self._random = vocabulary, random.Random(seed)

    def next(self) -> list[int]:
        return self._random.choices(range(3, self._vocabulary), k=PROMPT_TOKENS)


async def through_agent(llm: LLM, prompts: Prompts, count: int) -> list[float]:
    """Seconds of each request, one after the other."""
    seconds = []
    for _ in range(count):
        prompt = prompts.next()
        began = time.perf_counter()
        completion = await llm.generate(prompt, SamplingParams(max_tokens=1))
        seconds.append(time.perf_counter() - began)
        if len(completion.token_ids) != 1 or completion.cached_prompt_tokens:
            raise RunError(f"expected one token and no cached prompt, got {completion}")
    return seconds


async def direct(door: VllmDoor, prompts: Prompts, count: int) -> list[float]:
    """The same, past the agent."""
    seconds = []
    for _ in range(count):
        prompt = prompts.next()
        began = time.perf_counter()
        ids = await door.generate(prompt, _DIRECT)
        seconds.append(time.perf_counter() - began)
        if len(ids) != 1:
            raise RunError(f"expected one token, got {ids}")
    return seconds


def figures(ours: Samples, theirs: Samples, model: str) -> list[Figure]:
    how = f"{model}, prompts of {PROMPT_TOKENS} tokens, each another; {len(ours)} requests: {ours}; {len(theirs)} direct: {theirs}"
    against = "vLLM's HTTP from the worker, same Unix socket"
    return [
        Figure.at_most("request for one token, median", ours.median / theirs.median, _GOAL, "x", against, how),
        Figure.told("request for one token, p95", ours.p95 / theirs.p95, "x", against),
        Figure.told("what the way adds, median", 1000 * (ours.median - theirs.median), "ms", against),
    ]


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError without the model, ConfigError without vLLM."""
    longer = json.dumps({"max_position_embeddings": 2 * PROMPT_TOKENS})
    engine = EngineConfig(kind="vllm", extra_args=["--hf-overrides", longer])
    with InferenceBed.open(small_model(MODEL), engine, _CONTEXT_TOKENS, say) as bed:
        return asyncio.run(_measure(bed, 20 if quick else 200, say))


async def _measure(bed: InferenceBed, calls: int, say: Say) -> list[Figure]:
    prompts = Prompts(json.loads((bed.model / "config.json").read_text())["vocab_size"])
    async with bed.client() as client, bed.doors() as (door,):
        llm = client.for_rollout(bed.servers[0], "path")
        await through_agent(llm, prompts, 3)  # connections, first compilation
        await direct(door, prompts, 3)
        say(f"{calls} requests of each side")
        ours, theirs = await in_turns(
            calls,
            _TURN,
            lambda count: through_agent(llm, prompts, count),
            lambda count: direct(door, prompts, count),
        )
    return figures(ours, theirs, bed.model.name)
