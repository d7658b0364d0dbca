"""How old, in weight versions, the tokens of a step may be: ``trainer.staleness``, or what it was when their batch was ordered."""

from __future__ import annotations

import logging

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.store import load

log = logging.getLogger(__name__)


class AgeLimit:
    """Of an attempt that goes on behind ``step``. Batches that an earlier one made ahead with a larger staleness are recorded
    and come again: their tokens were within its limit, and without them their steps and prompts would be used up for nothing."""

    def __init__(self, staleness: int, earlier: int, step: int) -> None:
        self._staleness, self._earlier = staleness, max(earlier, staleness)
        self._last_earlier = step + 1 + earlier
        """The last step whose batch can have been ordered by then."""

    @classmethod
    def of(cls, run: RunDirectory, staleness: int, step: int) -> AgeLimit:
        """With the settings that the run's attempts began with."""
        earlier = max([_staleness(attempt) for attempt in run.all_attempts()], default=0)
        if earlier > staleness:
            log.warning(
                "trainer.staleness is %d and was %d: batches up to step %d may be recorded from then, and are trained on with "
                "tokens of up to %d versions. `prorl-hpc resume --fresh %s` discards them instead",
                staleness, earlier, step + 1 + earlier, earlier, run.path,
            )  # fmt: skip
        return cls(staleness, earlier, step)

    def at(self, step: int) -> int:
        """In versions."""
        return self._earlier if step <= self._last_earlier else self._staleness


def _staleness(attempt: RunDirectory) -> int:
    try:
        return load(attempt.attempt_config_file).trainer.staleness
    except (OSError, ValueError) as error:
        log.warning("what attempt %d had for trainer.staleness is not known: %s", attempt.attempt, error)
        return 0
