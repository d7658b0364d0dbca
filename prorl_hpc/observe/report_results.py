"""The report's section on rewards: held-out ones before and after, the best model, training."""

from __future__ import annotations

from typing import Any

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.markdown import markdown_table
from prorl_hpc.observe.reading import read_tolerantly
from prorl_hpc.observe.run_figures import RunFigures, wilson_interval
from prorl_hpc.observe.wording import number


def results_section(run: RunDirectory, figures: RunFigures) -> str:
    rows = []
    if figures.evals:
        first, last = figures.evals[0], figures.evals[-1]
        before = "before training" if first["step"] == 0 else f"after step {first['step']}"
        rows.append((f"held-out reward {before}", _evaluation(first)))
        if len(figures.evals) > 1:
            rows.append((f"held-out reward after step {last['step']}", _evaluation(last)))
        if first.get("held_out") != last.get("held_out"):
            sets = f"{_held_out_told(first)} first, {_held_out_told(last)} last"
            rows.append(("**held-out rewards cannot be compared**", f"settings or rows were changed: {sets}"))
    if (kept := read_tolerantly(run.checkpoints / "best" / "best.json", _Best)) is not None:
        told = f"{number(kept.reward, 3)} after step {kept.step}: `{run.checkpoints / 'best'}`"
        rows.append(("best held-out reward", told))
    rewards = [r for r in figures.steps if isinstance(r.get("reward"), int | float)]
    if rewards:
        rows.append(("training reward, first step", number(rewards[0]["reward"], 3)))
        best = max(rewards, key=lambda r: float(r["reward"]))
        rows.append(("training reward, last step", number(rewards[-1]["reward"], 3)))
        rows.append(("training reward, best step", f"{number(best['reward'], 3)} (step {best['step']})"))
    trained = [r for r in figures.steps if "loss" in r]
    for key, what in (("entropy", "entropy, nats"), ("clip_fraction", "share of tokens clipped")):
        if trained and key in trained[-1]:
            rows.append((f"{what}, last step with an update", number(trained[-1][key], 3)))
    if not rows:
        return "## Results\n\nNo step was finished and nothing was evaluated."
    return "## Results\n\n" + markdown_table(("", ""), rows)


class _Best(msgspec.Struct):
    """What ``checkpoints/best/best.json`` holds."""

    step: int
    reward: float


def _held_out_told(record: dict[str, Any]) -> str:
    held_out = record.get("held_out") or {}
    names = ("prompts", "samples", "temperature", "digest")
    prompts, samples, temperature, digest = (held_out.get(name, "unknown") for name in names)
    return f"{prompts} prompts × {samples} at temperature {temperature} (rows {digest})"


def _evaluation(record: dict[str, Any]) -> str:
    """Reward with counts and a 95 % Wilson interval of the success rate."""
    successes, trials = record.get("successes"), record.get("rollouts")
    if not isinstance(successes, int) or not isinstance(trials, int) or not trials:
        return number(record.get("reward"), 3)
    low, high = wilson_interval(successes, trials)
    rate = f"{successes} of {trials} solved, 95 % interval of the success rate {low:.1%} to {high:.1%}"
    return f"{number(record.get('reward'), 3)} ({rate})"
