"""The same faults with the real coordinator, workers and LLM server (a scripted one): no result is lost or given twice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_site import FaultySite, SiteJob

from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.slurm.endings import Ending, StopOrder, order_stop
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.tasks.testing import write_chat_model

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def submitted(site: FaultySite, root: Path | None = None) -> SiteJob:
    config = site.config()
    config.run.root = str(root or config.run.root)
    config.model.path = str(write_chat_model(site.cluster.shared / "model"))
    config.engine.kind, config.sandbox.kind = "scripted", "local"
    config.trainer.enabled = False
    config.task.name = "fakes.gated_task:GatedTask"
    config.task.options = {"gates": str(site.cluster.shared)}
    config.rollout.run_slots, config.rollout.retries = 96, 9
    config.run.restarts, config.run.drain_s = 9, 1.0
    for gate in site.cluster.shared.glob("gate-*"):
        gate.unlink()
    return site.submit(config, {}, "--real")


@contextmanager
def ordering(job: SiteJob, gates: int) -> Iterator[subprocess.Popen[str]]:
    """A client on the login node, which waits for its batch."""
    words = [sys.executable, "-m", "fakes.ordering", job.site.there(job.run), str(gates)]
    client = subprocess.Popen(job.site.cluster.command(words), stderr=subprocess.PIPE, text=True)
    try:
        yield client
    finally:
        client.kill()
        client.wait()


def open_gate(job: SiteJob, gate: int) -> None:
    (job.site.cluster.shared / f"gate-{gate}").touch()


def done(job: SiteJob) -> int:
    """Rollouts that the coordinator has recorded, as its status file tells."""
    file = job.run.status_file
    return int(json.loads(file.read_text())["rollouts"].get("done", 0)) if file.exists() else 0


def test_no_result_is_lost_or_given_twice_whatever_fails(site: FaultySite) -> None:
    gates = 5
    job = submitted(site)
    job.until_ready()
    with ordering(job, gates) as client:
        job.until("an accepted batch", (job.run.path / "accepted").exists)

        job.kill("--name coordinator")
        job.kill("--name worker-1")
        job.until("two restarts", lambda: len(read_restarts(job.run)) == 2)
        open_gate(job, 0)
        job.until("the first results", lambda: done(job) >= 16)

        site.cluster.cut(job.host_of("worker-1"))
        time.sleep(2 * job.run.load_config().rollout.lost_after_s)  # it is given up, with what it had
        site.cluster.heal(job.host_of("worker-1"))
        open_gate(job, 1)
        job.until("the results after the cut", lambda: done(job) >= 32)

        site.slurm("scontrol", "requeue", job.job_id)
        job.until_ready(2)
        open_gate(job, 2)
        job.until("the results of the second attempt", lambda: done(job) >= 48)

        with site.crashed(job.host_of("coordinator", 2)):
            job.until_ready(3)
            open_gate(job, 3)
            job.until("the results of the third attempt", lambda: done(job) >= 64)
            job.kill("--name inference-0")
            open_gate(job, 4)
            said = client.communicate(timeout=120)
            assert client.returncode == 0, f"{said}\n{job.story()}"

    order_stop(job.attempt(3), StopOrder(Ending.STOPPED, "told by a test"))
    job.until_state("COMPLETED")
    each_is_answered_once(job, gates)
    job.leaves_nothing()


def each_is_answered_once(job: SiteJob, gates: int) -> None:
    """To the client, in the stream, and in the run directory."""
    expected = {f"b.g{row}.s{sample}" for row in range(4 * gates) for sample in range(4)}
    answered = json.loads((job.run.path / "ordered.json").read_text())
    assert answered["statuses"] == dict.fromkeys(expected, "done")
    assert Counter(answered["streamed"]) == dict.fromkeys(expected, 1)
    assert Counter(read_rollouts(job.run, ["rollout_id"])["rollout_id"].to_pylist()) == dict.fromkeys(expected, 1)


def test_a_full_disk_is_a_failure_with_a_name_and_costs_no_result(site: FaultySite) -> None:
    job = submitted(site, site.small / "runs")
    job.until_ready()
    with ordering(job, 2) as client:
        job.until("an accepted batch", (job.run.path / "accepted").exists)
        open_gate(job, 0)
        job.until("the first results", lambda: done(job) >= 16)
        with site.small_disk_full():
            open_gate(job, 1)
            job.until_state("FAILED")
            job.leaves_nothing()
        assert read_failure(job.run) is not None
        assert "disk" in str(read_failure(job.run)) or "coordinator" in str(read_failure(job.run))
        again = site.submit_again(job.run, "--real")
        again.until_ready(2)
        said = client.communicate(timeout=120)
        assert client.returncode == 0, f"{said}\n{again.story()}"
    order_stop(again.attempt(2), StopOrder(Ending.STOPPED, "told by a test"))
    again.until_state("COMPLETED")
    each_is_answered_once(again, 2)
    again.leaves_nothing()
