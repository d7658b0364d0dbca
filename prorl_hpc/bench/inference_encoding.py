"""CPU time of an inference agent for a request, with the engine's server a stub that answers at once."""

from __future__ import annotations

import asyncio
import json
import random

import psutil

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import InferenceBed
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.stub_vllm import ANSWER_TOKENS
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.tasks.testing import write_chat_model

PROMPT_TOKENS = 30_000
_VOCABULARY = 150_000
_GOAL_MS = 5.0
_WARM_UP = 10


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process so far, in user and in kernel mode; the clock ticks every 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure(quick: bool, say: Say) -> list[Figure]:
    # only the stub's module runs, so that no engine needs to be installed
    engine = EngineConfig(kind="scripted")
    with scratch_directory() as directory:
        model = write_chat_model(directory)
        # the agent checks that ids are of the vocabulary
        (model / "config.json").write_text(json.dumps({"vocab_size": _VOCABULARY}))
        with InferenceBed.open(model, engine, 2 * PROMPT_TOKENS, say, agent="bench.stub_agent") as bed:
            return [asyncio.run(_measure(bed, 50 if quick else 500, say))]


async def _measure(bed: InferenceBed, requests: int, say: Say) -> Figure:
    source = random.Random(0)
    prompt = source.choices(range(_VOCABULARY), k=PROMPT_TOKENS)
    pid = bed.processes.pid(bed.names[0])
    async with bed.client() as client:
        llm = client.for_rollout(bed.servers[0], "encoding")
        before = 0.0
        for number in range(_WARM_UP + requests):
            if number == _WARM_UP:
                say(f"{requests} requests of {PROMPT_TOKENS} tokens")
                before = cpu_seconds(pid)
            prompt[number] = source.randrange(_VOCABULARY)  # as a rollout's next turn: mostly the same ids, never all
            completion = await llm.generate(prompt, SamplingParams())
            if len(completion.token_ids) != ANSWER_TOKENS:
                raise RunError(f"the stub gives {ANSWER_TOKENS} tokens, {len(completion.token_ids)} arrived")
        each_ms = 1000 * (cpu_seconds(pid) - before) / requests
    how = f"mean of {requests} requests of {PROMPT_TOKENS} tokens, answered with {ANSWER_TOKENS}; all threads, user and kernel"
    return Figure.below("CPU time of the agent for a request", each_ms, _GOAL_MS, "ms", "the goal", how)
