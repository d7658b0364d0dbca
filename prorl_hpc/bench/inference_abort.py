"""How long an engine goes on working for a rollout that was cancelled."""

from __future__ import annotations

import asyncio
import time

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import InferenceBed, small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.samples import Samples
from prorl_hpc.bench.vllm_door import GENERATED, RUNNING, WAITING, VllmDoor
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import SamplingParams

MODEL = "smollm2-135m"
_GOAL_S = 1.0
_CONTEXT_TOKENS = 2048
_POLL_S = 0.01
_GIVE_UP_S = 60.0
_QUIET_S = 0.3
_TRIES = 5


async def _until(what: str, door: VllmDoor, reached: dict[str, tuple[float, float]]) -> None:
    """Until each counter is within its (least, most)."""
    deadline = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < deadline:
        counters = await door.counters()
        if all(least <= counters[name] <= most for name, (least, most) in reached.items()):
            return
        await asyncio.sleep(_POLL_S)
    raise RunError(f"{what}: not within {_GIVE_UP_S:g} s; vLLM counts {counters}")


async def one_cancellation(
    client: LLMClient, bed: InferenceBed, door: VllmDoor, prompt: list[int], at_once: int
) -> float:
    """Seconds from the cancellation of so many rollouts, all generating, until their engine is idle. RunError if it
    generates on after that."""
    for attempt in range(_TRIES):
        before = await door.counters()
        asking = [asyncio.create_task(_ask(client, bed, prompt, f"{attempt}-{number}")) for number in range(at_once)]
        started = {RUNNING: (at_once, at_once), GENERATED: (before[GENERATED] + 4 * at_once, float("inf"))}
        try:
            await _until(f"{at_once} requests generate", door, started)
            if any(task.done() for task in asking):
                continue  # one was over before it could be cancelled
            began = time.monotonic()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await _until("the engine is idle", door, {RUNNING: (0, 0), WAITING: (0, 0)})
        seconds = time.monotonic() - began
        idle = (await door.counters())[GENERATED]
        await asyncio.sleep(_QUIET_S)
        if (later := (await door.counters())[GENERATED]) != idle:
            raise RunError(f"vLLM says that it is idle, and generates {later - idle:g} tokens in {_QUIET_S:g} s")
        return seconds
    raise RunError(f"of {at_once} requests one ended by itself before it was cancelled, {_TRIES} times")


async def _ask(client: LLMClient, bed: InferenceBed, prompt: list[int], name: str) -> Completion:
    llm = client.for_rollout(bed.servers[0], f"abort-{name}")
    return await llm.generate(prompt, SamplingParams(max_tokens=_CONTEXT_TOKENS - len(prompt)))


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError without the model, ConfigError without vLLM."""
    engine = EngineConfig(kind="vllm", kv_cache_mib=1024)
    with InferenceBed.open(small_model(MODEL), engine, _CONTEXT_TOKENS, say) as bed:
        return asyncio.run(_measure(bed, 3 if quick else 20, say))


async def _measure(bed: InferenceBed, times: int, say: Say) -> list[Figure]:
    prompt = ChatFormat.open(bed.model).encode_text("Count from one to a thousand: one, two, three, four, five,")
    found = []
    async with bed.client() as client, bed.doors() as (door,):
        for at_once in (1, 8):
            seconds = []
            for _ in range(times):
                seconds.append(await one_cancellation(client, bed, door, prompt, at_once))
            samples = Samples(seconds)
            say(f"{at_once} at once: {samples}")
            name = "cancelled rollout" if at_once == 1 else f"{at_once} rollouts cancelled at once"
            how = f"{bed.model.name}, the slowest of {len(samples)}; {samples}; looked at every {1000 * _POLL_S:g} ms"
            found.append(Figure.below(f"{name}: engine idle", samples.quantile(1.0), _GOAL_S, "s", "the goal", how))
    return found
