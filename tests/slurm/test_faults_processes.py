"""Processes that are killed, disks that are full, nodes that do not come up."""

from __future__ import annotations

import signal

import pytest
from faulty_site import FaultySite

from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.slurm.endings import Ending, lost_mark, read_ending
from prorl_hpc.slurm.failure import read_failure

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]


def test_what_is_killed_is_started_again_or_named(site: FaultySite) -> None:
    config = site.config(workers=2)
    job = site.submit(config, {"worker-1": {"grandchild": True}})
    job.until_ready()
    for name in ("coordinator", "worker-0", "inference-0"):
        job.kill(f"--name {name}")
    job.until("three restarts", lambda: len(read_restarts(job.run)) == 3)
    # A supervisor's processes die with it; the launcher removes what they leave, and goes on without its node.
    job.kill(f"prorl_hpc.slurm.node {job.run.path} 1 1")
    job.until("the loss of worker-1's node", lambda: lost_mark(job.run, 1).exists())
    job.until("the end of worker-1", lambda: not job.pids("worker-1") and not job.pids("time.sleep(600)"))
    assert "its supervisor was killed" in (job.run.logs / "launcher.log").read_text()
    job.until_ready(names=["coordinator", "worker-0", "inference-0"])
    assert job.state() == "RUNNING"
    job.kill("--name trainer-0")
    job.until_state("FAILED")
    failure = read_failure(job.run)
    assert failure is not None
    assert (failure.name, failure.what) == ("trainer-0", "was killed by SIGKILL")
    assert job.until_ended().ending is Ending.FAILED
    job.leaves_nothing()


def test_a_killed_launcher_ends_its_job_and_leaves_nothing(site: FaultySite) -> None:
    job = site.submit(site.config(), {})
    job.until_ready()
    job.signal_launcher(signal.SIGKILL)
    job.until_state("FAILED")
    job.leaves_nothing()
    assert read_ending(job.run) is None  # status says in Slurm's words how it ended


@pytest.mark.parametrize("what", ["a death", "a cancellation"])
def test_a_full_disk_ends_the_run_and_leaves_nothing(site: FaultySite, what: str) -> None:
    config = site.config(workers=1)
    config.run.root = str(site.small / "runs")
    config.run.restarts = 0
    job = site.submit(config, {"worker-0": {"exit_when": "go", "code": 3}})
    job.until_ready()
    with site.small_disk_full():
        if what == "a death":
            job.go()
            job.until_state("FAILED")
            failure = read_failure(job.run)
            assert failure is not None
            assert "could not be written down" in failure.what
        else:
            site.slurm("scancel", job.job_id)
            job.until_state("CANCELLED")
        job.leaves_nothing()


def test_nodes_that_do_not_come_up_are_named(site: FaultySite) -> None:
    slow, broken = site.config(workers=1), site.config(workers=1)
    slow.run.start_timeout_s = 6.0
    slow.cluster.trainer.setup = ["sleep 300"]
    broken.cluster.trainer.setup = ["echo no such module >&2", "exit 3"]
    jobs = [site.submit(slow, {}), site.submit(broken, {})]
    for job in jobs:
        job.until_state("FAILED")
        job.leaves_nothing()
    late, wrong = (read_failure(job.run) for job in jobs)
    assert late is not None
    assert wrong is not None
    assert "did not come up within 6 s (run.start_timeout_s): no supervisor reported from" in late.what
    assert "(trainer)" in late.what
    assert (wrong.name, wrong.what) == ("the supervisor of trainer", "could not be started (srun exited with code 3)")
    assert any("no such module" in line for line in wrong.last_lines)
