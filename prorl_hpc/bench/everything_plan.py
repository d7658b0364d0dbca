"""What ``bench all`` runs, and with which words: all of everything, or what fits into 15 minutes on two cores."""

from __future__ import annotations

from prorl_hpc.bench.everything import Bench

BENCHES = (
    Bench("conformance", [], ["--quick"]),
    Bench("tools", [], ["--quick"]),
    Bench("sandbox", [], ["--quick"]),
    Bench("coordinator", [], ["--quick"]),
    Bench("soak", [], ["rollouts=5000", "workers=4"]),
    Bench("inference", [], ["--quick"]),
    Bench("trainer", [], ["--quick"]),
    Bench("launch", [], ["--quick"]),
)

NO_BENCHES = {"all", "report", "fit"}
"""Verbs of ``prorl-hpc bench`` that measure nothing of their own."""
