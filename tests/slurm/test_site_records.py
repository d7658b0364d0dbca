"""What is read from Slurm's commands, of several versions."""

from __future__ import annotations

import time

import pytest
from site_texts import NEW, OLD, site_that_says

from prorl_hpc.slurm import site
from prorl_hpc.slurm.private.base import PrivateSlurm
from prorl_hpc.slurm.site import Answer, ask_site, controller_answers, run_command
from prorl_hpc.slurm.site_records import expand_hosts, parse_gpus, parse_minutes, parse_nodes, parse_version


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("02:00:00", 120),
        ("7-00:00:00", 10080),
        ("1-12", 2160),
        ("2-01:30", 2970),
        ("90", 90),
        ("90:30", 91),
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("NONE", None),
        ("", None),
    ],
)
def test_times_are_read_in_minutes(text: str, minutes: int | None) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:2", {"": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100:4(S:0-1),nvme:1", {"a100": 4}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1),gpu:1", {"a100": 4, "": 1}),
        ("gpu:h100", {"h100": 1}),
        ("gres/gpu:h100=8", {"h100": 8}),
    ],
)
def test_gpus_are_counted_by_type(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


def test_host_lists_are_expanded() -> None:
    assert expand_hosts("gpu[01-03,07],login") == ["gpu01", "gpu02", "gpu03", "gpu07", "login"]
    assert expand_hosts("r[1-2]n[08-10]") == [f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]
    assert expand_hosts("") == []


@pytest.mark.parametrize(
    ("text", "version"),
    [("slurm-wlm 22.05.8", (22, 5)), ("slurm 23.11.10-2", (23, 11)), ("slurm 24.11.5", (24, 11)), ("what?", None)],
)
def test_versions_are_read(text: str, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


def test_a_site_of_22_05_without_accounting() -> None:
    found = ask_site(site_that_says(OLD), "ann")
    assert found.version == (22, 5) and not found.silent and not found.heterogeneous
    assert found.settings.seconds("KillWait") == 10 and found.settings.get("LaunchParameters") == ""
    assert found.default_partition is not None and found.default_partition.name == "cpu"
    assert found.partitions["gpu"].max_minutes == 120 and found.partitions["gpu"].max_nodes is None
    assert [node.gpus for node in found.nodes_of("gpu")] == [{"": 2}, {"": 2}]
    assert found.associations is None and found.reservations == {}


def test_a_site_of_23_11_with_accounting() -> None:
    found = ask_site(site_that_says(NEW), "ann")
    assert found.version == (23, 11)
    accel = found.partitions["accel"]
    assert (accel.max_minutes, accel.allow_accounts, accel.allow_qos) == (None, ("lab", "proj1"), ("normal", "long"))
    assert accel.max_cpus_per_node == 64 and found.partitions["event"].needs_reservation
    nodes = {node.name: node for node in found.nodes}
    assert nodes["n001"].memory_mib == 250000 and nodes["n001"].available and nodes["n001"].features == ("rome", "ib")
    assert nodes["a01"].state == "IDLE" and nodes["a01"].gpus_of("A100") == 4 and nodes["a01"].gpus_of("h100") == 0
    assert not nodes["a02"].available and not nodes["h01"].available
    assert found.associations is not None and [a.account for a in found.associations] == ["lab", "proj1", "old"]
    assert found.qos["normal"].max_minutes == 1440 and found.qos["long"].flags == ("PartitionTimeLimit",)
    assert found.reservations["course"].users == ("ann", "bob")


def test_a_silent_controller_is_one_sentence_and_the_client_keeps_its_version() -> None:
    found = ask_site(site_that_says({"sbatch --version": OLD["sbatch --version"]}), "ann")
    assert found.silent == "`scontrol show config`: no such plugin" and found.version == (22, 5)
    assert found.partitions == {} and found.nodes == []


def test_the_version_comes_from_the_settings_where_sbatch_does_not_tell() -> None:
    texts = {key: text for key, text in OLD.items() if key != "sbatch --version"}
    assert ask_site(site_that_says(texts), "ann").version == (22, 5)


def test_other_schedulers_and_old_versions_start_no_heterogeneous_jobs() -> None:
    config = OLD["scontrol show config"].replace("sched/backfill", "sched/builtin")
    assert "only sched/backfill" in ask_site(site_that_says({**OLD, "scontrol show config": config})).heterogeneous
    ancient = ask_site(site_that_says({**OLD, "sbatch --version": "slurm 19.05.5\n"}))
    assert "older than 20.02" in ancient.heterogeneous


def test_lines_that_are_no_nodes_are_passed_over() -> None:
    assert parse_nodes("slurm_load_node error: Unable\n\n") == []


def test_a_command_that_is_missing_hangs_or_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "CALL_LIMIT_S", 0.1)
    assert run_command(["no-such-program"]).failed == "no-such-program is not on PATH"
    assert "gave no answer" in run_command(["sleep", "9"]).failed
    assert run_command(["ls", "/nowhere"]).failed.endswith("No such file or directory")
    assert controller_answers(lambda command: Answer("Slurmctld(primary) at m is DOWN\n")).endswith("DOWN")
    assert controller_answers(lambda command: Answer("Slurmctld(primary) at m is UP\n")) == ""


@pytest.mark.slurm
def test_a_real_site_is_asked_quickly(slurm_mini: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_mini.conf))
    began = time.monotonic()
    found = ask_site()
    print(f"asked in {time.monotonic() - began:.3f} s")
    assert found.silent == "" and found.version is not None and found.associations is None
    assert set(found.partitions) == {"cpu", "gpu", "urgent"} and found.partitions["cpu"].max_minutes
    assert {node.name for node in found.nodes_of("gpu")} == {"gpu01", "gpu02"}
    assert all(node.gpus == {"": 2} and node.available for node in found.nodes_of("gpu"))
