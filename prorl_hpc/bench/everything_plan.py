"""What ``bench all`` runs, and with which words: all of everything, or what fits into 15 minutes on two cores."""

from __future__ import annotations

from prorl_hpc.bench.everything import Bench
from prorl_hpc.bench.everything_page import SCALING
from prorl_hpc.slurm.private.base import missing

NO_BENCHES = {"all", "report", "fit"}
"""Verbs of ``prorl-hpc bench`` that measure nothing of their own."""
_SIZES = "16,64,256,1024,4096"
_QUICK_SIZES = "16,64,256,1024"
"""4,096 nodes alone take a minute."""


def benches() -> list[Bench]:
    """In the order in which they run: soonest first, so that what is wrong with a machine is seen soon.

    The quick words leave out what alone takes minutes: requeues, runs and steps of the real trainer, weight updates, sampled
    rollouts, and pools without sandboxes, which the ablation ``pools`` measures with them."""
    return [
        Bench("conformance", [], ["--quick"]),
        Bench("tools", [], ["--quick"]),
        Bench("sandbox", [], ["--quick"]),
        Bench("soak", [], ["rollouts=5000", "workers=4"]),
        Bench("launch", [], _quick("answers", "start", "watch")),
        Bench("coordinator", [], _quick("throughput", "latency", "simulator", "memory")),
        Bench("scaling", *_scaling()),
        Bench("inference", [], _quick("encoding", "abort", "sticky")),
        Bench("trainer", [], _quick("logprobs")),
    ]


def _quick(*parts: str) -> list[str]:
    return ["--quick", "--part", *parts]


def _scaling() -> tuple[list[str], list[str]]:
    """On namespaced nodes where they can be had, else as processes."""
    place = "--local" if missing("namespaced") else "--private"
    words = [f"out={{folder}}/{SCALING}", place, "--simulate"]
    whole = ["nodes=1,2,4,8", "ablate=all", *words, f"nodes={_SIZES}"]
    return whole, ["nodes=1,8", "ablate=batch", "--quick", *words, f"nodes={_QUICK_SIZES}"]
