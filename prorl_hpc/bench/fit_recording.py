"""A load from which a latency model can be fitted: one LLM server of this machine, conversations of all lengths, at rising
concurrency.

    python -m prorl_hpc.bench.fit_recording MODEL FILE [SECONDS] [MOST] [engine settings as JSON]

MODEL: one that ``prorl-hpc model prepare`` makes. Writes its fit to FILE, and says how good it is. Any run with
engine.record_requests=true serves ``bench fit`` as well; this one has what a fit needs in minutes.
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from prorl_hpc.bench.fit import LEAST_REQUESTS, LatencyFit, fit, write_fit
from prorl_hpc.bench.inference_bed import InferenceBed, small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.client import LLMClient
from prorl_hpc.messages.control import ServerRef
from prorl_hpc.messages.errors import ProrlError
from prorl_hpc.messages.rollout import SamplingParams

CONTEXT = 2048
_VOCABULARY = 10_000
"""Ids below it are words in every model that is prepared."""
_WARM_UP_S = 5.0
_LEAST = int(1.2 * LEAST_REQUESTS)
"""Requests in all, however long a slow machine takes."""


def record(
    model: Path, engine: EngineConfig, seconds: float, most: int, say: Say, extra: Path | None = None
) -> LatencyFit:
    """At 1, 2, 4, … ``most`` conversations at once, ``seconds`` in all or longer. ``extra``: where the records are copied
    to."""
    engine = replace(engine, record_requests=True)
    with InferenceBed.open(model, engine, CONTEXT, say) as bed:
        asyncio.run(_play(bed, seconds, most, say))
        if extra is not None:
            extra.mkdir(parents=True, exist_ok=True)
            for path in bed.run.requests.glob("*.jsonl"):
                (extra / path.name).write_bytes(path.read_bytes())
        return fit(bed.run.path)


async def _play(bed: InferenceBed, seconds: float, most: int, say: Say) -> None:
    server = bed.servers[0]
    async with bed.client() as client:
        warm = _Until(time.monotonic() + _WARM_UP_S, 2)
        await asyncio.gather(*(_converse(client, server, i, warm) for i in range(2)))
        for path in bed.run.requests.glob("*.jsonl"):  # the first requests of an engine pay for its warming up
            _keep_head(path)
        levels = [2**i for i in range(most.bit_length()) if 2**i <= most]
        for level in levels:
            say(f"{level} conversations at once")
            until = _Until(time.monotonic() + seconds / len(levels), math.ceil(_LEAST / len(levels)))
            await asyncio.gather(*(_converse(client, server, 100 * level + i, until) for i in range(level)))


@dataclass
class _Until:
    """A time, or later if fewer than ``requests`` have ended then."""

    time: float
    requests: int

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.time and self.requests <= 0


def _keep_head(path: Path) -> None:
    """Of the records, the line that says whose they are."""
    with path.open("r+b") as file:
        file.readline()
        file.truncate()


async def _converse(client: LLMClient, server: ServerRef, number: int, until: _Until) -> None:
    """One conversation after the other: a prompt, some turns, what tools say between, pauses as tools make them."""
    source = random.Random(number)
    made = 0
    while not until.over:
        made += 1
        llm = client.for_rollout(server, f"{number}-{made}")
        tokens = _words(source, int(source.lognormvariate(5.5, 0.8)))
        for _ in range(source.randint(1, 6)):
            sampling = SamplingParams(
                max_tokens=max(2, int(source.lognormvariate(3.2, 0.8))), seed=source.randrange(2**31)
            )
            if len(tokens) + sampling.max_tokens >= CONTEXT or until.over:
                break
            answer = await llm.generate(tokens, sampling)
            until.requests -= 1
            tokens = [*tokens, *answer.token_ids, *_words(source, int(source.lognormvariate(4.0, 1.0)))]
            await asyncio.sleep(source.expovariate(4.0))


def _words(source: random.Random, count: int) -> list[int]:
    return [source.randrange(100, _VOCABULARY) for _ in range(max(1, min(count, CONTEXT // 2)))]


def main(argv: list[str]) -> int:
    model, file, seconds, most, settings = (*argv, *["120", "8", "{}"][len(argv) - 2 :])
    engine = msgspec.json.decode(settings.encode(), type=EngineConfig)
    # Told to end, it takes down what it started, as it does at Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        found = record(small_model(model), engine, float(seconds), int(most), say, Path(file).with_suffix(".requests"))
    except ProrlError as error:
        print(error, file=sys.stderr)
        return 1
    write_fit(found, Path(file))
    print(found.text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
