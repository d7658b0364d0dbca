"""The launcher of an attempt: places the plan on the job's nodes, starts their supervisors, decides how it ends.

It is the callable that submitit runs, once: in the batch step of a Slurm job, or as a detached process on one machine.
An attempt ends when training is finished, a process that cannot be replaced has died, somebody stops it, or the
allocation is about to end; in the last case, and after a lost node without which it cannot go on, the job is put back
into the queue and goes on as the next attempt.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from importlib import import_module
from pathlib import Path

from prorl_hpc.config.run_directory import ATTEMPT, RUN_ID, RunDirectory, node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.attempt_clock import AllocationClock
from prorl_hpc.slurm.attempt_record import conclude
from prorl_hpc.slurm.children import tail
from prorl_hpc.slurm.earlier_attempts import fence_earlier_attempts, why_not_go_on
from prorl_hpc.slurm.endings import (
    OUT_OF_TIME,
    Ending,
    StopOrder,
    lost_mark,
    order_stop,
    read_node_end,
    read_stop,
    signalled_by_slurm,
)
from prorl_hpc.slurm.failure import FailureTeller, RunFailure, read_failure, record_failure
from prorl_hpc.slurm.launcher_watch import LauncherBeat
from prorl_hpc.slurm.losses import what_a_loss_means
from prorl_hpc.slurm.node import NodeSupervisor
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.requeueing import conclude_job
from prorl_hpc.slurm.signals import SignalPipe
from prorl_hpc.slurm.steps import PlacedNode, Step, place, srun_log, start_clean_up, start_steps

log = logging.getLogger(__name__)
POLL_S = 0.25
NODE_MARGIN_S = 15.0
"""So long after its processes should have ended a node may take before its step is ended."""
LOST_GRACE_S = 2.0
"""A step that ended without its supervisor's last word may only be ahead of a slow file system."""


def launch_attempt(run_dir: str, first_attempt: int) -> None:
    """What submitit runs. Raises RunError if the run failed."""
    run = RunDirectory.open(Path(run_dir))
    plan = read_json(run.plan_file, Plan)
    if plan is None:
        raise RunError(f"{run.plan_file} is missing: this run directory was not made by launch")
    on_slurm = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
    attempt = first_attempt + int(os.environ.get("SLURM_RESTART_COUNT", "0")) if on_slurm else first_attempt
    if why_not := why_not_go_on(run, range(first_attempt, attempt)):
        print(f"nothing is left to do: {why_not}")
        return
    os.environ |= {RUN_ID: run.run_id, ATTEMPT: str(attempt)}
    run = run.begin_attempt(attempt)
    logging.basicConfig(
        level="INFO",
        format="%(asctime)s %(levelname)-7s %(message)s",
        handlers=[logging.FileHandler(run.logs / "launcher.log")],
        force=True,
    )
    fence_earlier_attempts(run)
    log.info("attempt %d of %s", attempt, run.path)
    try:
        config = run.load_config()
    except ValueError as error:  # edited by hand since, perhaps
        record_failure(run, RunFailure("the launcher", node_name(), f"could not begin: {error}"))
        conclude(run, plan, Ending.FAILED, str(error), os.environ.get("SLURM_JOB_ID", "") if on_slurm else "")
        raise RunError(str(error)) from error
    if on_slurm:
        JobLauncher(run, config, plan, os.environ["SLURM_JOB_ID"]).run()
    else:
        launch_here(run, config, plan)


def launch_here(run: RunDirectory, config: ProrlConfig, plan: Plan) -> None:
    """An attempt on this machine: its one node in this process."""
    write_json(run.placement_file, [PlacedNode(0, plan.components[0].name, node_name(), 0)])
    ending, reason = NodeSupervisor(run, config, plan, 0, on_ready=preload_report_writer).run()
    conclude(run, plan, ending, reason)
    if ending is Ending.FAILED:
        raise RunError(str(read_failure(run) or reason))


def preload_report_writer() -> None:
    """Drawing needs seconds of imports: have them behind us before somebody waits for the end."""
    threading.Thread(target=import_module, args=("prorl_hpc.observe.report",), daemon=True).start()


class JobLauncher:
    """One attempt in a Slurm job."""

    def __init__(self, run: RunDirectory, config: ProrlConfig, plan: Plan, job_id: str) -> None:
        self._run, self._config, self._plan, self._job_id = run, config, plan, job_id
        self._steps: list[Step] = []
        self._cleaners: list[Step] = []
        self._ended: dict[int, float] = {}
        self._lost: dict[int, str] = {}
        self._failures = FailureTeller(run)
        self._beat = LauncherBeat(run)
        self._signals = SignalPipe((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD))
        self._clock = AllocationClock(job_id, config.cluster.signal_lead_s)
        self._begun = time.monotonic()
        self._preloaded = False
        self._to_go_on = False

    def run(self) -> None:
        """Blocks until the attempt is over on all nodes. Raises RunError on failure."""
        try:
            self._start()
            ending, reason = self._watch()
        except Exception as error:  # whatever it is, the nodes must be told to end
            log.exception("the launcher cannot go on")
            ending, reason = self._failed(RunFailure("the launcher", node_name(), f"could not go on: {error}"))
        log.info("the attempt ends: %s (%s)", ending, reason)
        self._wait_for_nodes()
        self._conclude(ending, reason)

    def _start(self) -> None:
        self._beat.beat()
        placed = place(self._plan, os.environ)
        write_json(self._run.placement_file, placed)
        self._steps = start_steps(self._run, self._config.cluster, placed, len(self._plan.components))
        self._clock.start()
        log.info(
            "started the supervisors of %s", ", ".join(f"node {n.rank} ({n.component}) on {n.host}" for n in placed)
        )

    # --- watching ---

    def _watch(self) -> tuple[Ending, str]:
        while True:
            if decided := self._marked() or self._signalled() or self._out_of_time() or self._losses() or self._late():
                return decided
            if not self._preloaded and self._first_result():
                self._preloaded = True
                preload_report_writer()
            self._pause()

    def _pause(self) -> None:
        self._beat.beat()
        self._signals.wait(POLL_S)

    def _marked(self) -> tuple[Ending, str] | None:
        names = self._names()
        if self._run.failure_file.name in names:
            return Ending.FAILED, self._failures.headline()
        if self._run.finished_marker.name in names:
            return Ending.FINISHED, "training is finished"
        if self._run.stop_marker.name in names and (order := read_stop(self._run)) is not None:
            return order.ending, order.reason
        return None

    def _names(self) -> set[str]:
        """What lies in state/: a listing is fresh on NFS, where exists() may answer from a cache."""
        return {path.name for path in self._run.state.iterdir()}

    def _signalled(self) -> tuple[Ending, str] | None:
        """SIGUSR2 announces the allocation's end; SIGTERM may be scancel, preemption or a requeue: it says not which."""
        for number in self._signals.take():
            if number == signal.SIGUSR2:
                return self._leave_off(OUT_OF_TIME, self._clock.lead_s())
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                return self._suspend(signalled_by_slurm(signal.Signals(number).name), 0.0)
        return None

    def _out_of_time(self) -> tuple[Ending, str] | None:
        return self._leave_off(OUT_OF_TIME, self._clock.lead_s()) if self._clock.due() else None

    def _leave_off(self, reason: str, lead_s: float) -> tuple[Ending, str]:
        """Suspend for a reason after which the job is to go on."""
        self._to_go_on = True
        return self._suspend(reason, lead_s)

    def _suspend(self, reason: str, lead_s: float) -> tuple[Ending, str]:
        """Order all nodes to leave off within ``lead_s``."""
        limit_s = max(0.0, lead_s - NODE_MARGIN_S)
        drain_s = max(0.0, min(self._config.run.drain_s, limit_s - self._config.run.stop_timeout_s))
        order = order_stop(self._run, StopOrder(Ending.SUSPENDED, reason, drain_s, limit_s))
        return order.ending, order.reason

    # --- nodes that are lost or do not come up ---

    def _losses(self) -> tuple[Ending, str] | None:
        """Steps that ended before the attempt did: what that means for the rest."""
        for step in self._steps:
            rank = step.node.rank
            if step.process.poll() is None or rank in self._lost:
                continue
            since = self._ended.setdefault(rank, time.monotonic())
            over = time.monotonic() - since > LOST_GRACE_S or step.log_says_node_failed
            silent = over and read_node_end(self._run, rank) is None
            if silent and (decided := self._lose(step)):
                return decided
        return None

    def _lose(self, step: Step) -> tuple[Ending, str] | None:
        node, code = step.node, step.process.returncode
        failed, lines = step.log_says_node_failed, tail(step.log, 20)
        if not failed and f"node-{node.rank}.up" not in self._names():
            what = f"could not be started (srun exited with code {code})"
            return self._failed(RunFailure(f"the supervisor of {node.component}", node.host, what, code, lines))
        self._lost[node.rank] = node.host
        what = (
            "Slurm says that the node failed" if failed else f"its supervisor was killed (srun exited with code {code})"
        )
        said = "".join(f"\n  | {line}" for line in lines)
        log.error("node %d (%s) on %s is lost: %s%s", node.rank, node.component, node.host, what, said)
        lost_mark(self._run, node.rank).touch()
        if not failed:
            self._cleaners.append(start_clean_up(self._run, self._config.cluster, node, len(self._plan.components)))
        if cannot := what_a_loss_means(self._plan, set(self._lost)):
            return self._leave_off(f"node {node.host} was lost, and {cannot}", self._config.run.stop_timeout_s)
        return None

    def _first_result(self) -> bool:
        """Rollouts are coming in: the start, which loading must not slow down, is over."""
        return self._run.rollouts.stat().st_size > 0 and any(self._run.rollouts.iterdir())

    def _late(self) -> tuple[Ending, str] | None:
        limit_s = self._config.run.start_timeout_s
        if time.monotonic() - self._begun < limit_s:
            return None
        names = self._names()
        late = [s.node for s in self._steps if f"node-{s.node.rank}.up" not in names and s.node.rank not in self._lost]
        if not late:
            return None
        hosts = ", ".join(f"{node.host} ({node.component})" for node in late)
        what = f"did not come up within {limit_s:.0f} s (run.start_timeout_s): no supervisor reported from {hosts}"
        lines = tail(srun_log(self._run, late[0].rank), 20)
        return self._failed(RunFailure("srun", late[0].host, what, None, lines))

    def _failed(self, failure: RunFailure) -> tuple[Ending, str]:
        self._failures.tell(failure)
        return Ending.FAILED, self._failures.headline()

    # --- the end ---

    def _wait_for_nodes(self) -> None:
        """Until every step has ended; those that take too long are ended through srun. If a newer attempt has begun, this one
        was out of Slurm's reach, and its sruns must say nothing: step numbers are given again."""
        if self._run.newest_attempt > self._run.attempt:
            self._wait_for_last_words()
            return
        order = read_stop(self._run)
        settings = self._config.run
        limit_s = max(settings.stop_timeout_s + (order.drain_s if order else 0.0), order.limit_s if order else 0.0)
        deadline = time.monotonic() + limit_s + NODE_MARGIN_S
        up = set() if self._failures.unrecorded is not None else self._names()
        for step in self._running():
            if f"node-{step.node.rank}.up" not in up:  # no supervisor that would see the mark, or no mark
                step.end()
        for end in (Step.end, Step.kill, Step.abandon):
            while self._running() and time.monotonic() < deadline:
                self._pause()
            for step in self._running():
                log.error("node %d on %s has not ended", step.node.rank, step.node.host)
                end(step)
            deadline = time.monotonic() + 5.0

    def _wait_for_last_words(self) -> None:
        """End the sruns, and wait for what their supervisors record: with this process Slurm would kill those here."""
        deadline = time.monotonic() + self._config.run.stop_timeout_s + NODE_MARGIN_S
        for step in self._running():
            step.abandon()
        ranks = [step.node.rank for step in self._steps if step.node.rank not in self._lost]
        while time.monotonic() < deadline and any(read_node_end(self._run, rank) is None for rank in ranks):
            self._pause()

    def _running(self) -> list[Step]:
        steps = [step for step in self._steps if step.node.rank not in self._lost]
        return [step for step in (*steps, *self._cleaners) if step.process.poll() is None]

    def _conclude(self, ending: Ending, reason: str) -> None:
        # After SIGTERM it is for Slurm to start the job again, or not.
        wanted = self._to_go_on and ending is Ending.SUSPENDED and signal.SIGTERM not in self._signals.seen
        wanted = wanted and self._config.cluster.requeue
        failed = [s.node.host for s in self._steps if s.node.rank not in self._lost and s.log_says_node_failed]
        if failed:  # Slurm ended the whole job for it, and somebody was quicker to say so
            reason = f"{reason}; Slurm says that {', '.join(failed)} failed"
        lost = [*self._lost.values(), *failed]
        record = conclude_job(self._run, self._plan, self._job_id, ending, reason, lost, wanted=wanted)
        if record.ending is Ending.FAILED:
            raise RunError(str(self._failures.told() or record.reason))
