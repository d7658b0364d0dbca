"""What is counted of the rollouts as they end."""

from __future__ import annotations

from array import array
from collections import Counter

from prorl_hpc.bench.simulation_draws import Fate
from prorl_hpc.bench.steady_rate import span
from prorl_hpc.messages.rollout import RolloutResult, Stage, Status


class Tally:
    def __init__(self) -> None:
        self.submitted = self.ended = self.done = self.retries = self.events = 0
        self.statuses: Counter[Status] = Counter()
        self.spans = array("d")
        """steady_rate.Spans of those that are done, row by row."""
        self.waits_s = {stage: array("d") for stage in Stage}
        """Waits for each stage, of the last attempts of all that ended."""
        self.work_s = [0.0, 0.0, 0.0]
        """INIT, RUN and EVAL at full speed, of those that are done."""

    def note(self, result: RolloutResult, fate: Fate, now: float) -> None:
        self.ended += 1
        self.retries += result.attempts - 1
        self.statuses[result.status] += 1
        for timing in result.timings:
            self.waits_s[timing.stage].append(timing.queued_s)
        if result.status is Status.DONE:
            self.done += 1
            self.spans.extend(span(now, result.timings))
            work = self.work_s
            work[0] += fate[0]
            work[1] += fate[1]
            work[2] += fate[2]
