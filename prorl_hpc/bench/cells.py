"""An ipython cell, ``1+1``, seen by the agent loop, against the usual client of a Jupyter kernel over TCP."""

from __future__ import annotations

import time

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.samples import Side, in_turns, ratio
from prorl_hpc.bench.sandbox_bed import SandboxBed
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import RunError

_GOALS = {"kernel": 0.8, "inprocess": 0.1}
_NAMES = {"kernel": "ipython `1+1`, kernel over ipc", "inprocess": "ipython `1+1`, in-process"}
_AGAINST = "jupyter_client over TCP"
_CALL_S = 60.0
_WARM_UP = 3
_TURN = 20
"""More than elsewhere: each turn of the peer starts a kernel."""


async def measure(calls: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    async with (
        SandboxBed.open(kind, SandboxConfig(ipython="kernel")) as kernel_bed,
        SandboxBed.open(kind, SandboxConfig(ipython="inprocess")) as inprocess_bed,
    ):

        async def tcp(count: int) -> list[float]:
            return await kernel_bed.inside("jupyter_tcp.py", count, "1+1")

        kernel, inprocess, peer = await in_turns(calls, _TURN, _cells(kernel_bed), _cells(inprocess_bed), tcp)
    say(f"1+1: kernel {kernel}, in-process {inprocess}, jupyter_client over TCP {peer}")
    figures = []
    for mode, ours in (("kernel", kernel), ("inprocess", inprocess)):
        figures += ratio(_NAMES[mode], ours, peer, _GOALS[mode], _AGAINST)
    return figures


def _cells(bed: SandboxBed) -> Side:
    async def times(count: int) -> list[float]:
        seconds = []
        for _ in range(_WARM_UP + count):
            began = time.perf_counter()
            result = await bed.sandbox.call("ipython", {"code": "1+1"}, _CALL_S)
            seconds.append(time.perf_counter() - began)
            if result.exit_code != 0 or result.output.split()[-1:] != ["2"]:
                raise RunError(f"the cell 1+1 gave {result}")
        return seconds[_WARM_UP:]

    return times
