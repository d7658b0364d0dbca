"""The supervisor of one node: starts the node's processes, watches them, and leaves nothing behind.

``python -m prorl_hpc.slurm.node RUN_DIR ATTEMPT RANK`` is what the launcher starts on every node of a Slurm job; on one
machine the launcher runs it itself. A coordinator, worker or inference agent that dies is started again, up to
``run.restarts`` times; any other unexpected death ends the attempt on all nodes, through the marks in its ``state/``;
so does the trainer's mark that training is finished.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prorl_hpc.config.run_directory import ATTEMPT, OWNER_FILE, RANK, RUN_ID, RunDirectory, node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm import cleanup, own_container
from prorl_hpc.slurm.children import (
    Child,
    become_subreaper,
    command_of,
    die_with_parent,
    end_descendants,
    reap,
    start_child,
    stop_in_order,
)
from prorl_hpc.slurm.endings import (
    Ending,
    NodeEnd,
    ProcessEnd,
    StopOrder,
    lost_mark,
    node_end_file,
    order_stop,
    read_stop,
    signalled_by_slurm,
)
from prorl_hpc.slurm.environment import after_setup, child_environment
from prorl_hpc.slurm.failure import FailureTeller, RunFailure
from prorl_hpc.slurm.gpus import split_gpus, visible_gpus
from prorl_hpc.slurm.launcher_watch import LauncherWatch, end_in_its_place
from prorl_hpc.slurm.plan import Plan, ProcessPlan
from prorl_hpc.slurm.process_identity import ProcessIdentity
from prorl_hpc.slurm.restarts import Restarts
from prorl_hpc.slurm.script import setup_lines
from prorl_hpc.slurm.signals import SignalPipe
from prorl_hpc.slurm.steps import PlacedNode

log = logging.getLogger(__name__)
POLL_S = 0.25
GRACE_S = 0.5
"""A death is believed to be unexpected when no stop has been seen for so long after it: scancel signals
supervisors and processes alike, in any order."""
CLEAN_EXIT_GRACE_S = 5.0
"""The same for exit code 0: on another node, the mark that explains it may still be on its way."""
_STOP_ORDER = (("coordinator", "trainer"), ("inference", "worker"))
"""The coordinator first: what agents lose while they stop is not to be taken for a failure of rollouts."""
_ENDING_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}
"""SIGUSR2 is the launcher's: srun hands it on."""


def main(argv: list[str]) -> int:
    """Exit code 0 when the node came to its end in order, however the attempt went: the marks tell that."""
    run_dir, attempt, rank = argv
    run = RunDirectory.open(Path(run_dir)).begin_attempt(int(attempt))
    os.environ |= {RUN_ID: run.run_id, ATTEMPT: attempt, RANK: rank}
    handler = logging.FileHandler(run.logs / f"node-{rank}.log")
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)-7s %(message)s", handlers=[handler], force=True)
    plan = read_json(run.plan_file, Plan)
    if plan is None:
        raise RunError(f"{run.plan_file} is missing: this run directory was not made by launch")
    supervisor = NodeSupervisor(run, run.load_config(), plan, int(rank))
    supervisor.run()
    return 0 if supervisor.failures.unrecorded is None else 1


class NodeSupervisor:
    """Runs ``plan.nodes[rank]`` to its end. ``on_ready`` is called once, when all of its processes are ready."""

    def __init__(
        self,
        run: RunDirectory,
        config: ProrlConfig,
        plan: Plan,
        rank: int,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._run, self._config, self._plan, self._rank = run, config, plan, rank
        self._node = node_name()
        self._here = config.cluster.kind == "local"
        self._children: list[Child] = []
        self._environments: dict[str, dict[str, str]] = {}
        self._restarts = Restarts(run, self._node, rank, config.run.restarts)
        self._signals = SignalPipe((*_ENDING_SIGNALS, signal.SIGCHLD))
        self._order: StopOrder | None = None
        self._launcher = LauncherWatch(run, config.rollout.lost_after_s)
        self._in_its_place: PlacedNode | None = None
        self.failures = FailureTeller(run)
        self._on_ready = on_ready

    def run(self) -> tuple[Ending, str]:
        """Blocks until the attempt is over on this node; returns how it ended, and why."""
        if self._here:
            die_with_parent(signal.SIGTERM)
        become_subreaper()
        try:
            (self._run.state / f"node-{self._rank}.up").touch()
            ending, reason = self._start_and_watch()
        except Exception as error:  # whatever it is, the processes of this node must end
            if not isinstance(error, ProrlError | OSError | ValueError):
                log.exception("the supervisor cannot go on")
            ending, reason = self._failed(RunFailure(f"node-{self._rank}", self._node, f"could not go on: {error}"))
        log.info("stopping: %s (%s)", ending, reason)
        self._leave(ending)
        if self._in_its_place is not None:
            end_in_its_place(self._run, self._plan, self._config, self._in_its_place, reason)
        return ending, reason

    # --- start and watch ---

    def _start_and_watch(self) -> tuple[Ending, str]:
        node_plan = self._plan.nodes[self._rank]
        runtime = self._run.make_runtime_dir(self._config.run.runtime_root)
        cleanup.empty(runtime)
        self._own(runtime)
        base = child_environment(os.environ, self._run, self._rank, self._config.run.runtime_root)
        if self._here:  # in a job, the step has done so before this process began
            lines = setup_lines(self._config.cluster.modules, self._config.cluster.setup)
            base = after_setup(lines, base, self._run.logs / "setup.log")
        gpus = visible_gpus(base)
        shares = split_gpus(node_plan, self._config, gpus.ids)
        for process in node_plan.processes:
            self._environments[process.name] = gpus.given(base, shares[process.role]) if shares else base
            self._children.append(self._start(process))
        return self._watch()

    def _own(self, runtime: Path) -> None:
        """Say in the runtime directory whose it is."""
        owner = {
            "run": self._run.run_id,
            "path": self._run.path,
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
            **ProcessIdentity.of(os.getpid()).words(),
        }
        (runtime / OWNER_FILE).write_text("".join(f"{key}={value}\n" for key, value in owner.items()))

    def _start(self, process: ProcessPlan) -> Child:
        log_file = self._run.process_log(process.name)
        words = command_of(process, self._run.path)
        command = own_container.wrap(words, process, self._config, self._run, self._environments[process.name])
        child = start_child(process, command, log_file)
        log.info("started %s as process %d", child.name, child.process.pid)
        return child

    def _watch(self) -> tuple[Ending, str]:
        while True:
            reap(self._children)
            if ending := self._seen_ending():
                return ending
            self._look_who_is_ready()
            dead = self._unexpected_death()
            if dead and not self._restarts.take(dead):
                return self._failed(self._death(dead))
            self._start_again()
            if late := self._late():
                return self._failed(self._not_ready(late))
            self._signals.wait(POLL_S)

    def _start_again(self) -> None:
        for dead in self._restarts.due():
            self._children[self._children.index(dead)] = self._start(dead.plan)

    def _seen_ending(self) -> tuple[Ending, str] | None:
        marks = self._marks()
        if self._run.failure_file.name in marks:
            return Ending.FAILED, self.failures.headline()
        if self._run.finished_marker.name in marks:
            return Ending.FINISHED, "training is finished"
        if lost_mark(self._run, self._rank).name in marks:
            return Ending.SUSPENDED, f"Slurm has taken {self._node} out of the job"
        if self._run.stop_marker.name in marks:
            self._order = read_stop(self._run)
        elif came := [number for number in self._signals.take() if number in _ENDING_SIGNALS]:
            self._order = self._ordered(self._order_of(came[0]))
        elif not self._here and (launcher := self._launcher.lost()):
            reason = f"{launcher.host}, the launcher's node, was lost ({self._node} tells)"
            self._order = self._ordered(StopOrder(Ending.SUSPENDED, reason))
            self._in_its_place = launcher if self._order.reason == reason else None
        return (self._order.ending, self._order.reason) if self._order is not None else None

    def _order_of(self, number: signal.Signals) -> StopOrder:
        """On one machine a signal is somebody's wish; in a job it may be a preemption, and the job go on later."""
        if self._here:
            return StopOrder(Ending.STOPPED, f"{number.name} on {self._node}")
        told = number == signal.SIGUSR2  # by the launcher, where it could write no order
        reason = f"the launcher told {self._node} to leave" if told else signalled_by_slurm(number.name)
        return StopOrder(Ending.SUSPENDED, reason)

    def _ordered(self, order: StopOrder) -> StopOrder:
        """The order that holds for all; ours for this node alone if it cannot be written."""
        try:
            return order_stop(self._run, order)
        except OSError as error:
            log.error("the order to stop could not be written: %s", error)
            return order

    def _marks(self) -> set[str]:
        """File names in state/: a listing is fresh on NFS, where exists() may answer from a cache."""
        return {path.name for path in self._run.state.iterdir()}

    def _unexpected_death(self) -> Child | None:
        """The child that died first, once nothing has explained its end for the grace time."""
        dead = [c for c in self._children if c.ended_at is not None and not self._restarts.pending(c)]
        for child in sorted(dead, key=lambda c: c.ended_at or 0.0):
            grace = GRACE_S if child.process.returncode else CLEAN_EXIT_GRACE_S
            if time.monotonic() - (child.ended_at or 0.0) > grace:
                return child
        return None

    def _look_who_is_ready(self) -> None:
        for child in self._children:
            if not child.ready:
                state = self._state_of(child)
                child.ready = state is not None and state.phase is Phase.READY
                if child.ready:
                    log.info("%s is ready", child.name)
        if self._on_ready is not None and all(child.ready for child in self._children):
            self._on_ready()
            self._on_ready = None

    def _state_of(self, child: Child) -> ProcessState | None:
        """What it said of itself since this start of it."""
        state = read_json(self._run.process_state(child.name), ProcessState)
        return state if state is not None and state.start_token == child.token else None

    def _late(self) -> list[Child]:
        """Those that should have been ready by now."""
        oldest = time.monotonic() - self._config.run.start_timeout_s
        return [c for c in self._children if c.running and not c.ready and c.started_at < oldest]

    # --- failure ---

    def _failed(self, failure: RunFailure) -> tuple[Ending, str]:
        self.failures.tell(failure)
        return Ending.FAILED, self.failures.headline()

    def _death(self, child: Child) -> RunFailure:
        what = child.death + self._restarts.used_up(child)
        return RunFailure(
            child.name, self._node, what, child.process.returncode, child.last_lines(), log=str(child.log)
        )

    def _not_ready(self, late: list[Child]) -> RunFailure:
        """Names all that did not come up; the last lines are those of the first."""
        doing = []
        for child in late:
            state = self._state_of(child)
            doing.append(f"{child.name} ({(state.detail if state is not None else '') or 'starting'})")
        what = (
            f"was not ready after {self._config.run.start_timeout_s:.0f} s (run.start_timeout_s); "
            f"not ready on this node: {', '.join(doing)}"
        )
        return RunFailure(late[0].name, self._node, what, None, late[0].last_lines(), log=str(late[0].log))

    # --- the end ---

    def _leave(self, ending: Ending) -> None:
        began = time.monotonic()
        if ending is Ending.FINISHED:
            self._let_trainers_exit()
        elif self._order is not None and self._order.drain_s > 0:
            self._drain(self._order.drain_s)
        limit_s = self._config.run.stop_timeout_s
        if self._order is not None:
            limit_s = max(limit_s, self._order.limit_s - (time.monotonic() - began))
        tiers = [[c for c in self._children if c.plan.role in roles] for roles in _STOP_ORDER]
        stop_in_order([tier for tier in tiers if tier], limit_s)
        left = end_descendants(self._children)
        left += cleanup.remove_node_files(self._run, self._config.run.runtime_root)
        if left:
            log.error("could not be ended or removed: %s", "; ".join(left))
        ends = [ProcessEnd(c.name, self._node, c.process.returncode, c.ending) for c in self._children]
        try:
            write_json(node_end_file(self._run, self._rank), NodeEnd(self._rank, self._node, ends, left))
        except OSError as error:
            log.error("how this node ended could not be written: %s", error)

    def _let_trainers_exit(self) -> None:
        """The trainer that wrote the mark is about to exit by itself."""
        self._wait_while(lambda: any(c.running for c in self._of("trainer")), self._config.run.stop_timeout_s)

    def _drain(self, seconds: float) -> None:
        """The trainer saves and goes; no rollout is started, and those under way may end. A signal cuts it short."""
        for child in self._of("trainer"):
            child.send(signal.SIGTERM)
        for child in self._of("coordinator"):
            if self._state_of(child) is not None:  # else it would be killed; it sees the order when it begins to serve
                child.send(signal.SIGUSR1)
        drained = self._run.drained_marker.name
        self._wait_while(
            lambda: drained not in self._marks() and not _ENDING_SIGNALS & {*self._signals.take()}, seconds
        )

    def _of(self, role: str) -> list[Child]:
        return [child for child in self._children if child.plan.role == role]

    def _wait_while(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            self._signals.wait(POLL_S)
            reap(self._children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
