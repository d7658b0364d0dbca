"""The supervisor of one node: starts the node's processes, watches them, and leaves nothing behind.

It is the callable that submitit runs, once per node. A coordinator or worker that dies is started again, up to
``run.restarts`` times; any other unexpected death ends the run on all nodes, through the marks in the run directory's
``state/``; so does the trainer's mark that training is finished.
"""

from __future__ import annotations

import enum
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType

from prorl_hpc.config.run_directory import RunDirectory, node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm import cleanup
from prorl_hpc.slurm.children import (
    Child,
    become_subreaper,
    die_with_parent,
    end_descendants,
    reap,
    start_child,
    stop_in_order,
)
from prorl_hpc.slurm.environment import after_setup, child_environment, split_gpus, visible_gpus
from prorl_hpc.slurm.failure import RunFailure, read_failure, record_failure
from prorl_hpc.slurm.plan import Plan, ProcessPlan
from prorl_hpc.slurm.restarts import Restarts

log = logging.getLogger(__name__)
POLL_S = 0.25
GRACE_S = 0.5
"""A death is believed to be unexpected when no stop has been seen for so long after it: scancel signals
supervisors and processes alike, in any order."""
CLEAN_EXIT_GRACE_S = 5.0
"""The same for exit code 0: on another node, the mark that explains it may still be on its way."""
_STOP_ORDER = ("trainer", "inference", "worker", "coordinator")


class Ending(enum.Enum):
    """Why a node stops."""

    FINISHED = "training is finished"
    STOPPED = "the run was told to stop"
    FAILED = "a process failed"


def supervise(run_dir: str) -> None:
    """What submitit runs on every node; raises RunError if the run failed."""
    run = RunDirectory.open(Path(run_dir))
    plan = read_json(run.plan_file, Plan)
    if plan is None:
        raise RunError(f"{run.plan_file} is missing: this run directory was not made by launch")
    NodeSupervisor(run, run.load_config(), plan, global_rank(os.environ)).run()


def global_rank(environ: Mapping[str, str]) -> int:
    """This node's place in the plan; one task per node, ranks global over the components."""
    return int(environ["SLURM_PROCID"]) if environ.get("SUBMITIT_EXECUTOR") == "slurm" else 0


class NodeSupervisor:
    """Runs ``plan.nodes[rank]`` to its end."""

    def __init__(self, run: RunDirectory, config: ProrlConfig, plan: Plan, rank: int) -> None:
        self._run, self._config, self._plan, self._rank = run, config, plan, rank
        self._node = node_name()
        self._children: list[Child] = []
        self._environments: dict[str, dict[str, str]] = {}
        self._restarts = Restarts(run, self._node, rank, config.run.restarts)
        self._signalled = ""
        self._loader: threading.Thread | None = None
        self._log_file = run.logs / f"node-{rank}.log"

    def run(self) -> None:
        """Blocks until the run is over on this node. Raises RunError on failure, here or elsewhere."""
        self._log_to_file()
        self._catch_signals()
        if self._config.cluster.kind == "local":
            die_with_parent(signal.SIGTERM)
        become_subreaper()
        try:
            ending = self._start_and_watch()
        except (ProrlError, OSError, ValueError) as error:
            ending = self._failed(RunFailure(f"node-{self._rank}", self._node, f"could not go on: {error}"))
        log.info("stopping: %s", ending.value)
        self._leave(ending)

    def _log_to_file(self) -> None:
        handler = logging.FileHandler(self._log_file)
        logging.basicConfig(
            level="INFO", format="%(asctime)s %(levelname)-7s %(message)s", handlers=[handler], force=True
        )

    def _catch_signals(self) -> None:
        """SIGTERM (scancel, preemption, time limit), SIGINT and submitit's SIGUSR2 all mean: stop in order."""

        def told_to_stop(number: int, frame: FrameType | None) -> None:
            self._signalled = self._signalled or signal.Signals(number).name

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, told_to_stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to be woken
        self._wake, write_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    # --- start and watch ---

    def _start_and_watch(self) -> Ending:
        node_plan = self._plan.nodes[self._rank]
        runtime = self._run.make_runtime_dir(self._config.run.runtime_root)
        cleanup.empty(runtime)
        gpus = split_gpus(node_plan, self._config, visible_gpus(os.environ))
        base = child_environment(os.environ, self._run.run_id)
        base = after_setup(self._config.cluster.setup, base, self._log_file)
        for process in node_plan.processes:
            environ = {**base, "CUDA_VISIBLE_DEVICES": ",".join(gpus.get(process.role, []))} if gpus else base
            self._environments[process.name] = environ
            self._children.append(self._start(process))
        return self._watch()

    def _start(self, process: ProcessPlan) -> Child:
        log_file = self._run.process_log(process.name)
        child = start_child(process, self._run.path, log_file, self._environments[process.name])
        log.info("started %s as process %d", child.name, child.process.pid)
        return child

    def _watch(self) -> Ending:
        while True:
            reap(self._children)
            if ending := self._seen_ending():
                return ending
            all_ready = self._all_ready()
            dead = self._unexpected_death()
            if dead and not self._restarts.take(dead):
                return self._failed(self._death(dead))
            self._start_again()
            if late := self._late():
                return self._failed(self._not_ready(late))
            if all_ready:
                self._load_report_writer()
            select.select([self._wake], [], [], POLL_S)
            self._drain_wakeups()

    def _start_again(self) -> None:
        for dead in self._restarts.due():
            self._children[self._children.index(dead)] = self._start(dead.plan)

    def _load_report_writer(self) -> None:
        """Drawing needs seconds of imports: have them behind us before somebody waits for the end."""
        if self._rank == 0 and self._loader is None:
            self._loader = threading.Thread(target=import_module, args=("prorl_hpc.observe.report",), daemon=True)
            self._loader.start()

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self._wake, 512):
                pass
        except BlockingIOError:
            return

    def _seen_ending(self) -> Ending | None:
        marks = self._marks()
        if self._run.failure_file.name in marks:
            return Ending.FAILED
        if self._run.finished_marker.name in marks:
            return Ending.FINISHED
        if self._run.stop_marker.name in marks:
            return Ending.STOPPED
        if self._signalled:
            # the other nodes may not have been signalled
            self._run.stop_marker.write_text(f"{self._signalled} on {self._node}")
            return Ending.STOPPED
        return None

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

    def _all_ready(self) -> bool:
        for child in self._children:
            if not child.ready:
                state = read_json(self._run.process_state(child.name), ProcessState)
                fresh = state is not None and state.pid == child.process.pid
                child.ready = fresh and state is not None and state.phase is Phase.READY
                if child.ready:
                    log.info("%s is ready", child.name)
        return all(child.ready for child in self._children)

    def _late(self) -> list[Child]:
        """Those that should have been ready by now."""
        oldest = time.monotonic() - self._config.run.start_timeout_s
        return [c for c in self._children if c.running and not c.ready and c.started_at < oldest]

    # --- failure ---

    def _failed(self, failure: RunFailure) -> Ending:
        if record_failure(self._run, failure):
            log.error("%s", failure)
        return Ending.FAILED

    def _death(self, child: Child) -> RunFailure:
        what = child.death + self._restarts.used_up(child)
        return RunFailure(
            child.name, self._node, what, child.process.returncode, child.last_lines(), log=str(child.log)
        )

    def _not_ready(self, late: list[Child]) -> RunFailure:
        """Names all that did not come up; the last lines are those of the first."""
        doing = []
        for child in late:
            state = read_json(self._run.process_state(child.name), ProcessState)
            detail = state.detail if state is not None and state.pid == child.process.pid else ""
            doing.append(f"{child.name} ({detail or 'starting'})")
        what = (
            f"was not ready after {self._config.run.start_timeout_s:.0f} s (run.start_timeout_s); "
            f"not ready on this node: {', '.join(doing)}"
        )
        return RunFailure(late[0].name, self._node, what, None, late[0].last_lines(), log=str(late[0].log))

    # --- the end ---

    def _leave(self, ending: Ending) -> None:
        if ending is Ending.FINISHED:
            self._let_trainers_exit()
        tiers = [[c for c in self._children if c.plan.role == role] for role in _STOP_ORDER]
        stop_in_order([tier for tier in tiers if tier], self._config.run.stop_timeout_s)
        left = end_descendants(self._children)
        left += cleanup.remove_node_files(self._run, self._config.run.runtime_root)
        if left:
            log.error("could not be ended or removed: %s", "; ".join(left))
        (self._run.state / f"node-{self._rank}.ended").touch()
        if ending is Ending.FAILED or self._rank == 0:
            self._wait_for_other_nodes()
        if self._rank == 0:
            self._write_report()
        if ending is Ending.FAILED:
            raise RunError(str(read_failure(self._run) or "the run failed"))
        if left:
            raise RunError(f"node {self._node} still has: {'; '.join(left)}")

    def _let_trainers_exit(self) -> None:
        """The trainer that wrote the mark is about to exit by itself."""
        deadline = time.monotonic() + self._config.run.stop_timeout_s
        trainers = [child for child in self._children if child.plan.role == "trainer"]
        while any(child.running for child in trainers) and time.monotonic() < deadline:
            reap(self._children)
            time.sleep(0.05)

    def _wait_for_other_nodes(self) -> None:
        """A task that fails makes srun kill the others at once, so let them stop in order first."""
        deadline = time.monotonic() + self._config.run.stop_timeout_s + 5.0
        wanted = {f"node-{rank}.ended" for rank in range(len(self._plan.nodes))}
        while not wanted <= self._marks() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _write_report(self) -> None:
        from prorl_hpc.observe.report import write_report

        try:
            write_report(self._run)
        except Exception:  # the run's own ending must not be hidden by a report that cannot be drawn
            log.exception("the report could not be written")
