"""What Slurm and people do to a job: requeue, preemption, time limit, cancellation."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from faulty_site import FaultySite, SiteJob

from prorl_hpc.slurm.endings import Ending, StopOrder, order_stop, signalled_by_slurm
from prorl_hpc.slurm.failure import read_failure

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]
FINISH_AT_GO = {"trainer-0": {"exit_when": "go", "finish": True}}


def test_an_admins_requeue_and_a_preemption_lead_to_the_next_attempts(site: FaultySite) -> None:
    job = site.submit(site.config(), {**FINISH_AT_GO, "coordinator": {"drain_after": 60.0}})
    first = job.until_ready()
    # It comes while the attempt already leaves off: that is cut short.
    order_stop(first, StopOrder(Ending.SUSPENDED, "told by a test", drain_s=60.0, limit_s=60.0))
    site.slurm("scontrol", "requeue", job.job_id)
    assert job.until_ended(1).ending is Ending.SUSPENDED
    job.until_ready(2)
    assert job.run.newest_attempt == 2
    host = job.host_of("trainer-0", 2)
    preempt = [
        "sbatch",
        "--parsable",
        "-p",
        "urgent",
        "-w",
        host,
        "--exclusive",
        "--wrap",
        "sleep 3",
        "-o",
        "/dev/null",
    ]
    preempting = site.slurm(*preempt).strip()
    ended = job.until_ended(2)
    assert (ended.ending, ended.goes_on) == (Ending.SUSPENDED, False)  # Slurm does it, not we
    job.until_ready(3)
    assert site.slurm("squeue", "-h", "-t", "all", "-j", preempting, "-o", "%T").strip() == "COMPLETED"
    job.go()
    job.until_finished(3)


def test_jobs_that_reach_their_time_limit(site: FaultySite) -> None:
    def at_the_limit(acts: dict[str, Any], *, requeue: bool = True, without_progress: int = 9) -> SiteJob:
        config = site.config(workers=1)
        config.cluster.time_minutes, config.cluster.signal_lead_s = 1, 52.0
        config.cluster.requeue, config.cluster.requeue_without_progress = requeue, without_progress
        config.cluster.trainer.partition = "cpu"
        config.cluster.rollout.cpus = config.cluster.trainer.cpus = 1
        return site.submit(config, acts)

    chain = at_the_limit({"trainer-0": {"exit_in_attempt": 3, "finish": True}})
    stuck = at_the_limit({}, without_progress=2)
    alone = at_the_limit({}, requeue=False)

    ended = alone.until_ended(1)
    assert (ended.ending, ended.goes_on, ended.reason) == (Ending.SUSPENDED, False, "the allocation ends soon")
    alone.until_state("COMPLETED")

    chain.until_state("COMPLETED")
    last = chain.run.newest_attempt
    assert last >= 3
    chain.until_finished(last)
    for number in range(1, last):
        ended = chain.until_ended(number)
        assert (ended.ending, ended.goes_on, ended.reason) == (Ending.SUSPENDED, True, "the allocation ends soon")

    stuck.until_state("FAILED")
    failure = read_failure(stuck.attempt(2))
    assert failure is not None
    assert "made no progress in 2 attempts" in failure.what
    assert "cluster.requeue_without_progress=2" in failure.what
    for job in (alone, stuck):
        job.leaves_nothing()


def test_a_cancelled_job_and_a_cancelled_component_end_in_order(site: FaultySite) -> None:
    whole, part = site.submit(site.config(workers=1), {}), site.submit(site.config(workers=1), {})
    whole.until_ready()
    site.slurm("scancel", whole.job_id)
    whole.until_state("CANCELLED")
    assert whole.until_ended().ending is Ending.SUSPENDED
    part.until_ready()
    inference = str(int(part.job_id) + 1)
    site.slurm("scancel", inference)
    ended = part.until_ended()
    assert (ended.ending, ended.reason, ended.goes_on) == (Ending.SUSPENDED, signalled_by_slurm("SIGTERM"), False)
    part.until_state("COMPLETED", "CANCELLED")
    for job in (whole, part):
        assert read_failure(job.run) is None
        job.leaves_nothing()


def test_a_job_that_is_cancelled_or_stopped_while_it_waits_to_go_on_does_not(site: FaultySite) -> None:
    cancelled, stopped = site.submit(site.config(workers=1), {}), site.submit(site.config(workers=1), {})
    for job in (cancelled, stopped):
        job.until_ready()
        if job is stopped:  # the launcher is cut off before it can follow
            job.signal_launcher(signal.SIGSTOP)
            order_stop(job.run, StopOrder(Ending.STOPPED, "told by a test"))
        site.slurm("scontrol", "requeuehold", job.job_id)
        job.until_state("PENDING", "REQUEUE_HOLD")
    site.slurm("scancel", cancelled.job_id)
    cancelled.until_state("CANCELLED")
    site.slurm("scontrol", "release", stopped.job_id)
    stopped.until_state("COMPLETED")
    assert stopped.run.newest_attempt == 1
    for job in (cancelled, stopped):
        job.leaves_nothing()


def test_a_requeue_that_slurm_refuses_is_told(site: FaultySite) -> None:
    config = site.config(workers=1)
    config.cluster.time_minutes, config.cluster.signal_lead_s = 1, 52.0
    job = site.submit(config, {})
    # at once: Slurm may send the signal of the allocation's end long before its time
    site.slurm("scontrol", "update", f"jobid={job.job_id}", "requeue=0")
    job.until_state("COMPLETED")
    ended = job.until_ended()
    assert (ended.ending, ended.goes_on) == (Ending.SUSPENDED, False)
    assert ended.reason.startswith("the allocation ends soon; scontrol requeue said: ")
    job.leaves_nothing()
