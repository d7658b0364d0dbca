"""Which dead processes of a node are started again, and when.

A coordinator, worker or inference agent holds nothing that is lost with it, so its death need not end the run: the
coordinator goes on from its journal, a worker's rollouts are tried again, an inference agent gets the newest weights and
its rollouts go on elsewhere or with it. Of an agent that died, its LLM server is killed too, and gone with the GPU's
memory before the new agent starts one. (A server that dies alone is started again by its agent: engine.restarts.)
Trainers are not started again here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.restarts import Restart, RestartLog
from prorl_hpc.slurm.children import Child

log = logging.getLogger(__name__)
ROLES = ("coordinator", "worker", "inference")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
LAST_LINES = 5
KIN_LIMIT_S = 30.0
"""What cannot be killed for so long does not hold the restart up any more."""


class Restarts:
    """At most ``allowed`` restarts of each process of this node, with a pause that doubles each time.

    Only a process that was ready once in this job is started again: one that never came up would fail the same way.
    """

    def __init__(self, run: RunDirectory, node: str, rank: int, allowed: int) -> None:
        self._run, self._node, self._allowed = run, node, allowed
        self._log = RestartLog(run.restarts_file(rank))
        self._counts: Counter[str] = Counter()
        self._pending: dict[str, tuple[float, Child]] = {}

    def take(self, child: Child) -> bool:
        """Plan the restart of a dead child; False if its death ends the run. What it had started is killed."""
        count = self._counts[child.name] + 1
        was_ready = child.ready or count > 1
        if child.plan.role not in ROLES or not was_ready or count > self._allowed:
            return False
        child.kill_kin()
        self._counts[child.name] = count
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (count - 1))
        self._pending[child.name] = time.monotonic() + pause_s, child
        restart = Restart(child.name, self._node, child.death, count, self._allowed, time.time())
        self._tell(child, restart, pause_s)
        return True

    def pending(self, child: Child) -> bool:
        """It is dead, and will be started again."""
        return child.name in self._pending

    def due(self) -> list[Child]:
        """Dead children whose pause is over, and of which nothing is left; each is named once."""
        now = time.monotonic()
        due = [child for when, child in self._pending.values() if when <= now and self._gone(child, now - when)]
        for child in due:
            del self._pending[child.name]
        return due

    @staticmethod
    def _gone(child: Child, late_s: float) -> bool:
        kin = child.kill_kin()
        if kin and late_s > KIN_LIMIT_S:
            pids = ", ".join(str(process.pid) for process in kin)
            log.error("%s left processes that cannot be killed: %s; it is started all the same", child.name, pids)
            return True
        return not kin

    def used_up(self, child: Child) -> str:
        """For the message about the death that ends the run; empty if it was never started again."""
        count = self._counts[child.name]
        return f", after {count} restart{'s' * (count > 1)} (run.restarts={self._allowed})" if count else ""

    def _tell(self, child: Child, restart: Restart, pause_s: float) -> None:
        said = "".join(f"\n  | {line}" for line in child.last_lines()[-LAST_LINES:])
        log.warning("%s, in %g s; its last lines:%s", restart, pause_s, said)
        self._log.append(restart)
        state = ProcessState(
            child.name, child.plan.role, self._node, child.process.pid, Phase.STARTING, restart.told, {}, time.time()
        )
        write_json(self._run.process_state(child.name), state)
        with child.log.open("a") as file:
            file.write(f"\n----- {time.strftime('%Y-%m-%d %H:%M:%S')} {restart} -----\n")
