"""When an attempt must begin to leave off: some time before the end of its allocation, as Slurm tells it."""

from __future__ import annotations

import logging
import threading
import time

from prorl_hpc.slurm.steps import allocation_end

log = logging.getLogger(__name__)
ASK_AGAIN_S = 300.0
"""An admin or the user may have changed the time limit."""
RETRY_S = 10.0


class AllocationClock:
    """Asks the controller in a thread of its own, so that nobody waits for a slow one."""

    def __init__(self, job_id: str, lead_s: float) -> None:
        self._job_id, self._lead_s = job_id, lead_s
        self._end: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._ask, name="allocation clock", daemon=True).start()

    def lead_s(self) -> float:
        """Seconds until the allocation's end; the configured lead while the end is unknown."""
        return self._lead_s if self._end is None else max(0.0, self._end - time.time())

    def due(self) -> bool:
        """Whether the lead has begun. Never without a lead, or while the end is unknown."""
        return bool(self._lead_s) and self._end is not None and time.time() >= self._end - self._lead_s

    def _ask(self) -> None:
        while True:
            end = allocation_end(self._job_id)
            if end is not None and end != self._end:
                log.info("Slurm ends this job at %s", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end)))
                self._end = end
            if end is None:
                time.sleep(RETRY_S)
                continue
            # Once more just before the lead begins, in case that the limit was raised meanwhile.
            until_lead = end - self._lead_s - time.time()
            time.sleep(min(ASK_AGAIN_S, max(1.0, until_lead - 2.0)))
