"""What doctor says of a site's Slurm, and of machines without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl_hpc.cli import doctor
from prorl_hpc.cli.doctor_slurm import examine_site
from prorl_hpc.cli.findings import Finding
from prorl_hpc.config.schema import ClusterConfig, ProrlConfig, RunSettings
from prorl_hpc.slurm.site import Site
from prorl_hpc.slurm.site_records import Association, Node, Partition, Settings

PLAN = ProrlConfig(cluster=ClusterConfig(kind="slurm"))


def site(settings: dict[str, str] | None = None, **more: object) -> Site:
    known = {
        "schedulertype": "sched/backfill",
        "killwait": "30 sec",
        "minjobage": "300 sec",
        "jobrequeue": "1",
        "proctracktype": "proctrack/cgroup",
        **(settings or {}),
    }
    nodes = [Node(f"n{i}", ("cpu",), 8, 16000) for i in range(4)]
    partition = Partition("cpu", default=True, max_minutes=120, total_nodes=4)
    return Site((23, 11), "slurm 23.11.4", Settings(known), {"cpu": partition}, nodes, user="ann", **more)  # type: ignore[arg-type]


def said(site: Site, config: ProrlConfig = PLAN) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine_site(site, config)}


def test_a_good_site_has_nothing_against_it() -> None:
    found = said(site())
    assert {finding.grade for finding in found.values()} == {"ok"}
    assert "since 22.05" in found["srun"].found and "since 23.11" in found["srun"].found
    assert "4 of 4 nodes up, at most 120 minutes" in found["partition"].found


def test_rules_of_later_versions_are_not_told() -> None:
    old = Site((21, 8), "slurm 21.08.8", site().settings, site().partitions, site().nodes)
    assert "22.05" not in said(old)["srun"].found and "20.11" in said(old)["srun"].found


def test_kill_wait_must_leave_processes_their_time() -> None:
    found = said(site({"killwait": "5 sec"}), ProrlConfig(run=RunSettings(stop_timeout_s=8)))["KillWait"]
    assert found.grade == "warn" and "run.stop_timeout_s below 5" in found.cure


def test_what_a_site_lacks_is_a_warning_with_a_cure() -> None:
    found = said(site({"minjobage": "10 sec", "proctracktype": "proctrack/linuxproc", "jobrequeue": "0"}))
    assert found["accounting"].grade == found["process tracking"].grade == "warn"
    assert found["requeue"].grade == "ok" and "overrides" in found["requeue"].found
    nobody = said(site({"accountingstorageenforce": "associations"}, associations=[]))["accounting"]
    assert nobody.grade == "warn" and "ask the admins" in nobody.cure
    mine = said(site(associations=[Association("lab")]))["accounting"]
    assert mine.grade == "ok" and "lab" in mine.found


def test_a_plan_is_held_against_the_site() -> None:
    config = ProrlConfig(cluster=ClusterConfig(kind="slurm", time_minutes=500))
    found = said(site(), config)["plan"]
    assert found.grade == "fail" and "cluster.time_minutes=500" in found.found
    assert "plan" not in said(site(), ProrlConfig())


def test_no_heterogeneous_jobs_is_a_failure() -> None:
    found = said(site({"schedulertype": "sched/builtin"}))["slurm"]
    assert found.grade == "fail" and "same_nodes_as" in found.cure


@pytest.mark.parametrize(("config", "grade"), [(ProrlConfig(), "warn"), (PLAN, "fail")])
def test_a_silent_controller_is_one_line(config: ProrlConfig, grade: str) -> None:
    (finding,) = examine_site(Site(silent="`scontrol show config` gave no answer in 5 s"), config)
    assert finding.grade == grade and "no answer" in finding.found and "SLURM_CONF" in finding.cure


@pytest.mark.parametrize(("config", "grade"), [(ProrlConfig(), "ok"), (PLAN, "fail")])
def test_a_machine_without_slurm(
    config: ProrlConfig, grade: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor._slurm(config)
    assert finding.grade == grade and "no sbatch here" in finding.found


def test_json_holds_every_finding_and_the_worst_grade(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [Finding("ok", "a", "b"), Finding("fail", "plan", "too long", "shorter", "trainer on gpu01")]
    monkeypatch.setattr(doctor, "examine", lambda config: iter(lines))
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["grade"] == "fail" and told["findings"][1]["where"] == "trainer on gpu01"


def test_no_allocation_is_asked_for_where_the_plan_cannot_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config: iter([Finding("fail", "plan", "no such partition")]))
    assert doctor.main(["--on-nodes", "cluster=slurm"]) == 1
    assert "not asked for" in capsys.readouterr().out
