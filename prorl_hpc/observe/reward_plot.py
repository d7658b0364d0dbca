"""reward.png: what training did to the reward, and what each step cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from prorl_hpc.observe.run_figures import RunFigures, wilson_interval
from prorl_hpc.observe.wording import step_seconds

PHASE_COLORS = {
    "rollouts": "#4c78a8",
    "training": "#f58518",
    "publishing": "#54a24b",
    "saving": "#b279a2",
    "evaluating": "#9d9da1",
}


def draw_reward_plot(figures: RunFigures, title: str, path: Path) -> None:
    """Training reward per step with the held-out evaluations (95 % intervals), over the seconds of each step.

    Draws on Agg directly: no display, no pyplot state. A run without steps gets a plot that says so.
    """
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    reward, seconds = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.suptitle(title)
    _draw_reward(reward, figures)
    _draw_seconds(seconds, figures.steps)
    figure.savefig(path, format="png")


def _draw_reward(axes: Axes, figures: RunFigures) -> None:
    trained = [(r["step"], r["reward"]) for r in figures.steps if isinstance(r.get("reward"), int | float)]
    held = [(r["step"], r["reward"]) for r in figures.evals if isinstance(r.get("reward"), int | float)]
    if trained:
        axes.plot(*zip(*trained, strict=True), marker="o", markersize=4, color="#4c78a8", label="training prompts")
    if held:
        axes.plot(*zip(*held, strict=True), linestyle="--", marker="D", color="#e45756", label="held-out prompts")
        _draw_intervals(axes, figures.evals)
    if trained or held:
        axes.legend(loc="best", frameon=False)
    else:
        axes.text(0.5, 0.5, "no step was finished", ha="center", va="center", transform=axes.transAxes)
    low, high = axes.get_ylim()
    axes.set_ylim(min(-0.03, low) if trained or held else 0.0, max(1.03, high))
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)


def _draw_intervals(axes: Axes, evals: list[dict[str, Any]]) -> None:
    for record in evals:
        successes, trials = record.get("successes"), record.get("rollouts")
        if isinstance(successes, int) and isinstance(trials, int) and trials:
            axes.vlines(record["step"], *wilson_interval(successes, trials), color="#e45756", alpha=0.6)


def _draw_seconds(axes: Axes, steps: list[dict[str, Any]]) -> None:
    numbers = [record["step"] for record in steps]
    phases = [
        p if isinstance(p := record.get("seconds"), dict) else {"total": step_seconds(record)} for record in steps
    ]
    names = list(dict.fromkeys(name for phase in phases for name in phase if name != "total"))
    base = [0.0] * len(steps)
    for name in names or ["total"]:
        heights = [float(phase.get(name) or 0.0) for phase in phases]
        axes.bar(numbers, heights, bottom=base, label=name, color=PHASE_COLORS.get(name))
        base = [b + h for b, h in zip(base, heights, strict=True)]
    if names:
        axes.legend(loc="upper left", ncols=len(names), frameon=False, fontsize="small")
        axes.set_ylim(0, max(base) * 1.3 or 1.0)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
