"""How the display, the plain lines and the report write numbers for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeGuard

from prorl_hpc.messages.batch import BatchResult

BARS = "▁▂▃▄▅▆▇█"


def clock(seconds: float) -> str:
    """``75`` → ``1:15``; hours where there are any."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last ``width`` values as bars; the scale holds at least 0 to 1, so that a reward of 0.5 is half a bar."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / (high - low) * len(BARS)))] for v in shown)


def number(value: Any, digits: int = 2) -> str:
    """A number with ``digits`` decimals; ``–`` for what is missing or no number."""
    return f"{value:.{digits}f}" if _is_number(value) else "–"


def count(amount: int, singular: str, plural: str = "") -> str:
    """``1 rollout``, ``2 rollouts``."""
    return f"{amount} {singular if amount == 1 else plural or singular + 's'}"


def finishes_told(finishes: dict[str, int]) -> str:
    """``120 answer, 8 context``, the commonest first."""
    return ", ".join(f"{n} {finish}" for finish, n in sorted(finishes.items(), key=lambda item: (-item[1], item[0])))


def commonest_failure(result: BatchResult) -> str:
    """``, 12 of them: no worker``: what most of the failed rollouts say; empty if none failed."""
    told = Counter(r.failure.message for group in result.groups for r in group.rollouts if r.failure is not None)
    return "".join(f", {count} of them: {message[:500]}" for message, count in told.most_common(1))


def overlap_told(record: dict[str, Any]) -> str:
    """Of a step: ``12 % idle, staleness 0.40 (at most 1)``, what of it is known; staleness only where there is any."""
    told = []
    if _is_number(idle := record.get("idle_fraction")):
        told.append(f"{idle:.0%} idle".replace("%", " %"))
    if _is_number(oldest := record.get("staleness_max")) and oldest > 0:
        told.append(f"staleness {number(record.get('staleness'))} (at most {oldest:g})")
    return ", ".join(told)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def step_seconds(record: dict[str, Any]) -> float | None:
    """Seconds that a step took in all; None if its record does not say."""
    seconds = record.get("seconds")
    if isinstance(seconds, int | float):
        return float(seconds)
    if isinstance(seconds, dict):
        total = seconds.get("total")
        if isinstance(total, int | float):
            return float(total)
        parts = [v for v in seconds.values() if isinstance(v, int | float)]
        return float(sum(parts)) if parts else None
    return None
