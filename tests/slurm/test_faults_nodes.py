"""Nodes that crash, lose their network or their slurmd: the run goes on on what is left, or as its next attempt."""

from __future__ import annotations

import time

import pytest
from faulty_site import FaultySite, SiteJob

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.endings import AttemptEnding, Ending, lost_mark

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]
FINISH_AT_GO = {"trainer-0": {"exit_when": "go", "finish": True}}


def trainer_on_cpu_nodes(site: FaultySite, workers: int = 2, servers: int = 1) -> ProrlConfig:
    config = site.config(workers, servers)
    config.cluster.trainer.partition = "cpu"
    return config


def is_lost(job: SiteJob, rank: int, attempt: int = 1) -> bool:
    return lost_mark(job.attempt(attempt), rank).exists()


def was_suspended(ended: AttemptEnding) -> bool:
    return (ended.ending, ended.goes_on) == (Ending.SUSPENDED, True)


def test_a_run_outlives_the_loss_of_each_kind_of_node(site: FaultySite) -> None:
    job = site.submit(trainer_on_cpu_nodes(site, servers=2), FINISH_AT_GO)
    job.until_ready()
    worker, server, trainer = (job.host_of(name) for name in ("worker-1", "inference-1", "trainer-0"))
    # It goes on without one of two nodes with LLM servers, and without a worker's node …
    with site.crashed(server):
        job.until("the loss of a server", lambda: is_lost(job, 3))
        assert job.state() == "RUNNING", job.story()
        with site.crashed(worker):
            job.until("the loss of a worker", lambda: is_lost(job, 1))
            assert job.state() == "RUNNING", job.story()
            # … but not without the trainer's: then it goes on as the next attempt.
            with site.crashed(trainer):
                ended = job.until_ended(1)
                assert ended.ending is Ending.SUSPENDED
                assert {*ended.lost_nodes} >= {worker, server}
    job.until_ready(2)
    # Slurm lets the rest of the job run on when the launcher's node is gone; a supervisor puts it back into the queue.
    coordinator = job.host_of("coordinator", 2)
    with site.crashed(coordinator):
        ended = job.until_ended(2)
        assert was_suspended(ended), ended
        assert f"{coordinator}, the launcher's node, was lost" in ended.reason
    job.until_ready(3)
    job.go()
    job.until_finished(3)


def test_a_dead_slurmd_and_a_cut_cable_cost_only_their_nodes(site: FaultySite) -> None:
    job = site.submit(trainer_on_cpu_nodes(site, workers=3), FINISH_AT_GO)
    job.until_ready()
    without_slurmd, without_cable = job.host_of("worker-1"), job.host_of("worker-2")
    site.cluster.kill_slurmd(without_slurmd)
    site.cluster.cut(without_cable)
    try:
        job.until("the loss of both nodes", lambda: is_lost(job, 1) and is_lost(job, 2))
        # What still runs there leaves, and disturbs nobody when Slurm reaches it again.
        job.until("the end of the lost workers", lambda: not job.pids("worker-1") and not job.pids("worker-2"))
    finally:
        site.cluster.heal(without_cable)
        site.cluster.start_slurmd(without_slurmd)
    site.restored(without_cable)
    assert job.state() == "RUNNING"
    assert not job.attempt(1).stop_marker.exists()
    job.go()
    job.until_finished(1)


def test_a_short_cut_is_not_noticed(site: FaultySite) -> None:
    job = site.submit(site.config(), FINISH_AT_GO)
    job.until_ready()
    host = job.host_of("worker-1")
    site.cluster.cut(host)
    time.sleep(3)
    site.cluster.heal(host)
    job.go()
    job.until_finished(1)


def test_an_attempt_that_slurm_cannot_reach_ends_when_the_next_one_begins(site: FaultySite) -> None:
    job = site.submit(site.config(workers=1), FINISH_AT_GO)
    job.until_ready()
    cut_off = job.host_of("coordinator")
    site.cluster.cut(cut_off)
    try:
        job.until_ready(2)  # one node in component 0: Slurm itself starts the job again
        assert job.host_of("coordinator", 2) != cut_off
        # What is left of the first one has seen the mark in the shared directory.
        assert job.until_ended(1).ending is Ending.SUSPENDED
    finally:
        site.cluster.heal(cut_off)
    site.restored(cut_off)
    assert job.run.newest_attempt == 2
    assert not job.attempt(2).stop_marker.exists()
    job.go()
    job.until_finished(2)
