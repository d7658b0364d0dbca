"""A command that writes much: how fast its output goes through the tool server, and whether twice takes twice."""

from __future__ import annotations

import time

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.samples import Side, in_turns, ratio
from prorl_hpc.bench.sandbox_bed import SandboxBed
from prorl_hpc.messages.errors import RunError

_LINE = b"0123456789 the quick brown fox jumps over the lazy dog and more of that kind.\n"
_MB, _TIMES = 10, 4
_CALL_S = 60.0
_TURN = 5


async def measure(calls: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    """10 MB against a bare pty that leaves line ends alone, as ours does (it is faster then), and 40 MB against four times that, with 30 % for noise."""
    async with SandboxBed.open(kind) as bed:
        await bed.sandbox.upload("small.txt", _LINE * (_MB * 1_000_000 // len(_LINE)))
        await bed.sandbox.upload("large.txt", _LINE * (_TIMES * _MB * 1_000_000 // len(_LINE)))

        async def bare(count: int) -> list[float]:
            return await bed.inside("bare_pty.py", count, "cat small.txt; echo {mark}", "--raw")

        ours, theirs, large = await in_turns(calls, _TURN, _cat(bed, "small.txt"), bare, _cat(bed, "large.txt"))
        say(f"{_MB} MB: ours {ours}, bare pty {theirs}; {_TIMES * _MB} MB: ours {large}")
        name = f"{_TIMES * _MB} MB of output over {_TIMES} times {_MB} MB, median"
        growth = large.median / (_TIMES * ours.median)
    return [
        *ratio(f"{_MB} MB of output", ours, theirs, 1.5, "`cat` through a bare ptyprocess"),
        Figure.at_most(name, growth, 1.3, "x", "linear in size", f"{len(large)} calls: {large}"),
    ]


def _cat(bed: SandboxBed, name: str) -> Side:
    async def times(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            result = await bed.sandbox.call("bash", {"command": f"cat {name}"}, _CALL_S)
            seconds.append(time.perf_counter() - began)
            if result.exit_code != 0 or not result.output.endswith(_LINE.decode()):
                raise RunError(f"`cat {name}` gave exit code {result.exit_code} and … {result.output[-200:]}")
        return seconds

    return times
