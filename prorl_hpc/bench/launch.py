"""``bench launch``: how soon the command line answers and a job works, what requeues cost, what watching costs."""

from __future__ import annotations

from collections.abc import Sequence

from prorl_hpc.bench import launch_answers, launch_demo, launch_requeues, launch_start, launch_watch
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say, measure_parts

PARTS = {
    "answers": "`launch --help`, `launch --dry-run` and `status`, and what they load",
    "start": "from a job's first instruction to its first rollout, new and requeued, on a private Slurm cluster (root)",
    "requeues": "20 requeues of one training run in a row, from outside and by the time limit, on such a cluster (root)",
    "demo": "the same with the real trainer and the tiny model",
    "watch": "calls of the controller and time for each look at 200 runs",
}


def measure(parts: Sequence[str], quick: bool, say: Say) -> list[Figure]:
    def part(name: str) -> list[Figure]:
        if name == "answers":
            return launch_answers.measure(3 if quick else 15, say)
        if name == "start":
            return launch_start.measure(1 if quick else 5, say)
        if name == "requeues":
            return launch_requeues.measure(3 if quick else 20, say)
        if name == "demo":
            return launch_demo.measure(2 if quick else 20, say)
        return launch_watch.measure(20 if quick else 200, 5 if quick else 30, say)

    return measure_parts(PARTS, parts, say, part)
