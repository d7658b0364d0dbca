"""What ``bench all`` runs, and with which words: all of everything, or what fits into 15 minutes on two cores."""

from __future__ import annotations

from prorl_hpc.bench.everything import Bench
from prorl_hpc.slurm.private.base import missing

NO_BENCHES = {"all", "report", "fit"}
"""Verbs of ``prorl-hpc bench`` that measure nothing of their own."""
_SIZES = "16,64,256,1024,4096"


def benches() -> list[Bench]:
    """In the order in which they run: soonest first, so that what is wrong with a machine is seen soon."""
    return [
        Bench("conformance", [], ["--quick"]),
        Bench("tools", [], ["--quick"]),
        Bench("sandbox", [], ["--quick"]),
        Bench("soak", [], ["rollouts=5000", "workers=4"]),
        Bench("coordinator", [], ["--quick"]),
        Bench("launch", [], ["--quick", "--part", "answers", "start", "requeues", "watch"]),
        Bench("scaling", *_scaling()),
        Bench("inference", [], ["--quick"]),
        Bench("trainer", [], ["--quick"]),
    ]


def _scaling() -> tuple[list[str], list[str]]:
    """On namespaced nodes where they can be had, else as processes."""
    words = ["nodes=1,2,4,8", "--simulate", f"nodes={_SIZES}", "out={folder}/scaling"]
    words.append("--local" if missing("namespaced") else "--private")
    return [*words, "ablate=all"], words
