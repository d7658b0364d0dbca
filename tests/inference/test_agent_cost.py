"""What a long prompt costs the inference agent: no work in Python for each of its tokens, so that it is encoded, decoded and
passed on as a whole. ``bench inference --part encoding`` measures its CPU time."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from agent_site import open_site
from vllm_bench import Bench

SHORT, LONG = 3_000, 30_000
REQUESTS, ROUNDS = 4, 3

WORKER = """
import asyncio, sys
from pathlib import Path
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.keys import RunKeys

async def main(ipc, keys, tokens, requests):
    client = LLMClient("here", RunKeys.load(Path(keys)), "worker-0")
    llm = client.for_rollout(ServerRef("inference-0", "here", ipc, ""), "r")
    prompt = [1 + i * 7919 % 150_000 for i in range(int(tokens))]
    for _ in range(int(requests)):
        await llm.generate(prompt, SamplingParams(max_tokens=4))
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def calls_of(tokens: int, ipc: str, keys: Path) -> int:
    """Of functions, Python's and C's, that the agent makes for the requests of a worker."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[event] += 1

    words = [ipc, str(keys), str(tokens), str(REQUESTS)]
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, *words)
    sys.setprofile(count)
    try:
        assert await worker.wait() == 0
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


async def test_a_long_prompt_costs_no_more_calls_than_a_short_one(bench: Bench, socket_dir: Path) -> None:
    """The least of several rounds: heartbeats and whatever else the agent does meanwhile make more calls, never fewer."""
    engine = bench.engine(max_context_tokens=2 * LONG)
    await engine.start(lambda text: None)
    async with open_site(socket_dir, engine) as site:
        keys = socket_dir / "keys"
        rounds = [[await calls_of(tokens, site.ref.ipc, keys) for tokens in (SHORT, LONG)] for _ in range(ROUNDS)]
        short, long = (min(calls) for calls in zip(*rounds, strict=True))
        print(f"calls of the agent for {REQUESTS} prompts: {short} of {SHORT} tokens, {long} of {LONG} tokens")
        assert short > 100 * REQUESTS
        assert (long - short) / (REQUESTS * (LONG - SHORT)) < 0.5  # a call for each token would be 1
    await engine.stop()
