"""Memory and time of token logprobs without holding all logits, against the plain way."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import msgspec

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.bench.trainer_step import threads
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.__main__ import ENVIRONMENT

_SCRIPT = Path(__file__).parent / "peers" / "logprob_ways.py"
_AGAINST = "log_softmax of all logits"
_LIMIT_S = 900.0
_MEMORY, _SAME = 0.5, 1e-4


class Ran(msgspec.Struct, frozen=True):
    """``before_mib``: the process's memory before the first measured pass, ``peak_mib`` after the last; ``gradient``: norm of
    the output embeddings' gradient."""

    seconds: list[float]
    before_mib: float
    peak_mib: float
    logprobs: list[float]
    gradient: float

    @property
    def added_mib(self) -> float:
        return self.peak_mib - self.before_mib


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError without the model or without torch."""
    rows, length, turns = 8, 256, 1 if quick else 3
    return figures(*compare(small_model("smollm2-135m"), rows, length, turns, say), f"{rows} rows of {length} tokens")


def compare(model: Path, rows: int, length: int, turns: int, say: Say) -> tuple[list[Ran], list[Ran]]:
    """Both ways in turns, each time in a process of its own: chunked, plain."""
    found: dict[str, list[Ran]] = {"chunked": [], "plain": []}
    with scratch_directory() as directory, Processes(directory) as processes:
        for _ in range(turns):
            for way in found:
                out = directory / "ran.json"
                numbers = {"rows": rows, "length": length, "repeats": 3, "threads": threads()}
                words = ["--way", way, "--model", str(model), "--out", str(out)]
                words += [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
                processes.start(way, [sys.executable, str(_SCRIPT), *words], ENVIRONMENT)
                if (code := processes.wait(way, _LIMIT_S)) != 0:
                    raise RunError(f"{way} ended with exit code {code}:\n{processes.tail(way)}")
                ran = msgspec.json.decode(out.read_bytes(), type=Ran)
                say(f"{way}: {statistics.median(ran.seconds):.2f} s, {ran.added_mib:.0f} MiB more")
                found[way].append(ran)
    return found["chunked"], found["plain"]


def figures(chunked: list[Ran], plain: list[Ran], size: str) -> list[Figure]:
    """Medians over turns."""
    ours, theirs = _median_added(chunked), _median_added(plain)
    fast, slow = _median_seconds(chunked), _median_seconds(plain)
    differ = max(abs(a - b) for a, b in zip(chunked[0].logprobs, plain[0].logprobs, strict=True))
    gradient = abs(chunked[0].gradient / plain[0].gradient - 1)
    how = f"{size}, forward and backward, one layer of SmolLM2-135M and its vocabulary of 49,152"
    return [
        Figure.at_most(
            "logprobs: memory of the logits",
            ours / theirs,
            _MEMORY,
            "x",
            _AGAINST,
            f"{how}: {ours:.0f} MiB, {theirs:.0f} MiB",
        ),
        Figure.told("logprobs: time", fast / slow, "x", _AGAINST, f"{fast:.2f} s, {slow:.2f} s"),
        Figure.at_most("logprobs: largest difference", differ, _SAME, "nats", _AGAINST),
        Figure.at_most("logprobs: gradient's norm differs by", 100 * gradient, 0.01, "%", _AGAINST),
    ]


def _median_added(ran: list[Ran]) -> float:
    return statistics.median(one.added_mib for one in ran)


def _median_seconds(ran: list[Ran]) -> float:
    return statistics.median(seconds for one in ran for seconds in one.seconds)
