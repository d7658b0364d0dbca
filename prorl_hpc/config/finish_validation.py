"""``trainer.overlong_finishes``: the ends of a rollout that overlong filtering may take for cuts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from prorl_hpc.config.schema import ProrlConfig

OVERLONG = ("turn_tokens", "rollout_tokens", "context", "turns", "repetition", "stop_string")
"""messages.trajectory.Finish, without the ends that say something of the policy's answer."""


def finish_errors(config: ProrlConfig) -> Iterator[str]:
    given = config.trainer.overlong_finishes
    for name in dict.fromkeys(given):
        if given.count(name) > 1:
            yield f"trainer.overlong_finishes has {name} {given.count(name)} times: once is enough"
        if name not in OVERLONG:
            near = difflib.get_close_matches(name, OVERLONG, n=1)
            suggestion = f"; did you mean {near[0]}?" if near else ""
            yield f"trainer.overlong_finishes: {name!r} is not possible: any of {', '.join(OVERLONG)}{suggestion}"
    if config.trainer.overlong_filtering and not given:
        yield (
            "trainer.overlong_finishes is empty, so overlong filtering leaves nothing out: name the ends that count as cut "
            f"({', '.join(OVERLONG)}), or set trainer.overlong_filtering=false"
        )
