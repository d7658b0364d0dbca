"""What is counted of the rollouts as they end."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from prorl_hpc.bench.simulation_draws import Fate
from prorl_hpc.messages.rollout import RolloutResult, Stage, StageTiming, Status


class Tally:
    def __init__(self) -> None:
        self.submitted = self.ended = self.done = self.retries = self.events = 0
        self.statuses: Counter[Status] = Counter()
        self.done_at_s = array("d")
        self.run_began_s = array("d")
        """Of those that are done, in the same order."""
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
            self.done_at_s.append(now)
            self.run_began_s.append(now - sum(_since_run_began(result.timings)))
            work = self.work_s
            work[0] += fate[0]
            work[1] += fate[1]
            work[2] += fate[2]


def _since_run_began(timings: Sequence[StageTiming]) -> Iterator[float]:
    """The parts of it, seconds."""
    for timing in timings:
        if timing.stage is Stage.RUN:
            yield timing.busy_s
        elif timing.stage is Stage.EVAL:
            yield timing.queued_s + timing.busy_s
