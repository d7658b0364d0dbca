"""The report's section on how fast the run was, and how rollouts and training overlapped."""

from __future__ import annotations

from prorl_hpc.observe.markdown import markdown_table
from prorl_hpc.observe.run_figures import RunFigures
from prorl_hpc.observe.wording import clock, number

NOTE = (
    "Rollouts and generated tokens are per second in which a batch was being made, which may be while the trainer learns; in "
    "the phase `rollouts` the trainer waited. An evaluation is no part of a step; the trainer waits for it too, and with "
    "`trainer.staleness` the next batch is made meanwhile."
)


def throughput_section(figures: RunFigures) -> str:
    """Empty of a run whose steps do not say how long they took."""
    phases = figures.seconds_by_phase
    if not phases:
        return ""
    of_steps, evaluating = sum(phases.values()), figures.evaluation_seconds
    if evaluating:
        phases["evaluating"] = evaluating
    total = of_steps + evaluating
    by_phase = [(name, clock(seconds), f"{seconds / total:.0%}") for name, seconds in phases.items() if total > 0]
    tables = [markdown_table(("", ""), _rates(figures, of_steps)), markdown_table(("phase", "time", "share"), by_phase)]
    return "\n\n".join(["## Throughput and time", NOTE, *tables])


def _rates(figures: RunFigures, phase_seconds: float) -> list[tuple[str, str]]:
    rates = [
        ("rollouts per second", number(figures.rate("rollouts"), 2)),
        ("generated tokens per second", number(figures.rate("tokens_generated"), 1)),
    ]
    if (trained := figures.training_rate("tokens_trained")) is not None:
        rates.append(("trained tokens per second of training", number(trained, 1)))
    steps, evaluating = len(figures.steps), figures.evaluation_seconds
    rates.append(("seconds per step", number(phase_seconds / steps, 1)))
    if evaluating:
        rates.append(("seconds per step, evaluations included", number((phase_seconds + evaluating) / steps, 1)))
    if (idle := figures.idle_fraction) is not None:
        rates.append(("trainer idle, waiting for rollouts", f"{idle:.0%} of the steps' time"))
        if evaluating:
            waited = evaluating + figures.seconds_by_phase.get("rollouts", 0.0)
            share = f"{waited / (phase_seconds + evaluating):.0%} of the whole time"
            rates.append(("trainer idle, waiting for rollouts or an evaluation", share))
    if (oldest := figures.largest("staleness_max")) is not None:
        versions = f"{number(figures.mean('staleness'), 2)} weight versions in the mean, {oldest:g} at most"
        rates.append(("age of the tokens trained on", versions))
    return rates
