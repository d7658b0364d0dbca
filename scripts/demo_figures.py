"""The figures of docs/demo.md from finished runs: ``python scripts/demo_figures.py RUN_DIR [RUN_DIR …]``.

Writes docs/demo-reward.png and prints the table, one row per run and the means.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step


def main(paths: list[str]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    rows = []
    for path in paths:
        run = RunDirectory.open(path)
        config = run.load_config()
        records = MetricsLog(run.metrics_file).read()
        steps, evals = newest_per_step(records, "step"), newest_per_step(records, "eval")
        if not steps or len(evals) < 2:
            sys.exit(
                f"{run.path} has {len(steps)} steps and {len(evals)} evaluations: it needs an evaluation before and after"
            )
        before, after = evals[0], evals[-1]
        (line,) = axes.plot(
            [s["step"] for s in steps],
            [s["reward"] for s in steps],
            alpha=0.7,
            label=f"training, seed {config.run.seed}",
        )
        axes.plot(
            [before["step"], after["step"]], [before["reward"], after["reward"]], "D", ls=":", color=line.get_color()
        )
        made = run.config_file.stat().st_mtime
        rows.append(
            (
                config.run.seed,
                before,
                after,
                statistics.mean(s["seconds"]["total"] for s in steps),
                steps[0]["time"] - made,
                after["time"] - made,
            )
        )
    axes.plot([], [], "D:", color="grey", label="held-out prompts")
    axes.set(
        xlabel="step",
        ylabel="success rate",
        ylim=(-0.03, 1.03),
        title="following a trail of files: SmolLM2-135M, DAPO, two CPU cores",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    target = Path(__file__).parent.parent / "docs" / "demo-reward.png"
    figure.savefig(target, dpi=110)
    print(
        "| seed | held-out before | held-out after | gain, points | s per step | launch to first step, s | launch to end, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for seed, before, after, step_s, first_s, total_s in rows:
        gain = 100 * (after["reward"] - before["reward"])
        print(
            f"| {seed} | {before['successes']} of {before['rollouts']} | {after['successes']} of {after['rollouts']} | {gain:.0f} "
            f"| {step_s:.0f} | {first_s:.0f} | {total_s:.0f} |"
        )
    means = [
        statistics.mean(values)
        for values in zip(*((b["reward"], a["reward"], s, f, t) for _, b, a, s, f, t in rows), strict=True)
    ]
    print(
        f"| mean | {means[0]:.3f} | {means[1]:.3f} | {100 * (means[1] - means[0]):.0f} | {means[2]:.0f} | {means[3]:.0f} | {means[4]:.0f} |"
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
