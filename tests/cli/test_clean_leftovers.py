"""clean: what dead runs left, never what a living one needs, never what may be anybody's; and ended runs for good."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm import leftovers, process_identity
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.job import JobRecord
from prorl_hpc.slurm.leftovers import find_leftovers
from prorl_hpc.slurm.process_identity import Life, ProcessIdentity
from prorl_hpc.slurm.run_index import all_runs, register_run
from prorl_hpc.slurm.states import JobReports


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for runtime directories, shared memory of its own, and a Slurm that knows job 5 alone."""
    for name in ("bin", "nodes", "shm", "here"):
        (tmp_path / name).mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho '5|RUNNING|None|N/A|1:00'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr("prorl_hpc.cli.clean.runtime_roots", lambda runs: [tmp_path / "nodes"])
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "nodes"


def runtime_dir(place: Path, digest: str, owner: str | None, age_s: float = 3600.0) -> Path:
    path = place / f"prorl-{os.getuid()}-{digest}"
    path.mkdir(mode=0o700)
    (path / "worker-0.sock").touch()
    if owner is not None:
        (path / "owner").write_text(owner)
    for file in (*path.iterdir(), path):
        os.utime(file, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def dead() -> ProcessIdentity:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        return ProcessIdentity.of(child.pid)


@pytest.fixture
def me() -> ProcessIdentity:
    return ProcessIdentity.of(os.getpid())


def owner_of(run: str, job: int | str, process: ProcessIdentity) -> str:
    owner = {"run": run, "path": f"/nowhere/{run}", "job": job, **process.words()}
    return "".join(f"{key}={value}\n" for key, value in owner.items())


def test_only_what_is_surely_dead_goes(
    place: Path, dead: ProcessIdentity, me: ProcessIdentity, capsys: pytest.CaptureFixture[str]
) -> None:
    dead_job = runtime_dir(place, "a", owner_of("demo-aaaaaa", 4, dead))
    dead_process = runtime_dir(place, "b", owner_of("demo-bbbbbb", "", dead))
    living_job = runtime_dir(place, "c", owner_of("demo-cccccc", 5, dead))
    # its directory may look older than the process: clocks are set
    living_process = runtime_dir(place, "d", owner_of("demo-dddddd", "", me), age_s=1e8)
    recycled = runtime_dir(
        place, "e", owner_of("demo-eeeeee", "", msgspec.structs.replace(me, started=me.started - 1)), age_s=0
    )
    unowned, young = runtime_dir(place, "f", None), runtime_dir(place, "g", None, age_s=0)
    foreign = place / "prorl-4294967294-h"
    foreign.mkdir()
    assert main(["clean", "--dry-run"]) == 0
    assert dead_job.exists()
    assert f"would remove {dead_job} of demo-aaaaaa" in capsys.readouterr().out
    assert main(["clean"]) == 0
    assert sorted(path.name[-1] for path in place.iterdir()) == ["c", "d", "g", "h"]
    assert not any(path.exists() for path in (dead_job, dead_process, recycled, unowned))
    assert all(path.exists() for path in (living_job, living_process, young, foreign))
    assert f"keeping {living_job} of demo-cccccc: job 5 is RUNNING" in capsys.readouterr().out


def test_a_process_of_another_place_is_not_taken_for_dead(
    place: Path, dead: ProcessIdentity, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same host name tells nothing: containers and reinstalled machines share them."""
    elsewhere = {
        "a": {"pidns": dead.pidns - 1},
        "b": {"boot": "another", "host": "node-b"},
        "c": {"boot": "another", "machine": "another"},
        "d": {"boot": "another", "machine": ""},
        "e": {"boot": "", "pidns": 0, "started": 0},
    }
    for digest, other in elsewhere.items():
        runtime_dir(place, digest, owner_of(f"demo-{digest * 6}", "", msgspec.structs.replace(dead, **other)))
    assert main(["clean"]) == 0
    assert sorted(path.name[-1] for path in place.iterdir()) == list(elsewhere)
    told = capsys.readouterr().out
    assert "in another PID namespace" in told
    assert "was started on node-b" in told


def test_a_reboot_ends_all_processes_of_a_machine(
    dead: ProcessIdentity, me: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = msgspec.structs.replace(me, boot="before", machine="m", pidns=17)
    monkeypatch.setattr(ProcessIdentity, "of", lambda pid: msgspec.structs.replace(me, machine="m", pidns=17))
    assert before.life() is Life.UNKNOWN  # a container's name and machine id are those of its image
    monkeypatch.setattr(process_identity, "_OUTSIDE_CONTAINERS", 17)
    assert before.life() is Life.DEAD
    assert msgspec.structs.replace(before, machine="other").life() is Life.UNKNOWN
    assert (dead.life(), me.life()) == (Life.UNKNOWN, Life.UNKNOWN)  # of another namespace by now


def test_a_job_of_another_run_or_cluster_says_nothing(
    place: Path, dead: ProcessIdentity, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_hpc.slurm.states.this_cluster", lambda: "this")
    (place.parent / "bin" / "squeue").write_text("#!/bin/sh\necho '5|RUNNING|None|N/A|1:00|prorl-demo-eeeeee'\n")
    ours = owner_of("demo-aaaaaa", 5, dead)
    reused = runtime_dir(place, "a", f"{ours}cluster=this\n")
    elsewhere = runtime_dir(place, "b", f"{ours}cluster=that\n")
    assert main(["clean"]) == 0
    assert not reused.exists()
    assert elsewhere.exists()
    assert "its job is on the cluster that" in capsys.readouterr().out


def test_what_goes_away_meanwhile_is_no_error(
    place: Path, dead: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that owns it removes it while clean looks."""
    paths = [runtime_dir(place, "a", None), runtime_dir(place, "b", owner_of("demo-bbbbbb", "", dead))]
    shared = place.parent / "shm" / "prorl-demo-cccccc-w"
    shared.touch()
    asks = leftovers.job_reports

    def ask_meanwhile(jobs: set[str]) -> JobReports:
        for path in paths:
            shutil.rmtree(path)
        return asks(jobs)

    monkeypatch.setattr(leftovers, "job_reports", ask_meanwhile)
    monkeypatch.setattr(leftovers.InUse, "user_of", lambda self, path: shared.unlink(missing_ok=True) or "")
    assert main(["clean"]) == 0


def test_nothing_of_a_job_goes_while_slurm_does_not_answer(place: Path, dead: ProcessIdentity) -> None:
    squeue = place.parent / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    path = runtime_dir(place, "a", owner_of("demo-aaaaaa", 4, dead))
    assert main(["clean"]) == 0
    assert path.exists()


@pytest.fixture
def holder(place: Path) -> Iterator[Path]:
    """A directory without an owner in which a process has a file open."""
    path = runtime_dir(place, "open", None)
    program = f"import sys; f = open({str(path / 'worker-0.sock')!r}); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        yield path
        process.stdin.close()


def test_without_an_owner_what_is_in_use_stays(place: Path, holder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listening = runtime_dir(place, "listens", None)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening / "s"))
        server.listen()
        os.utime(listening, (1, 1))
        assert main(["clean"]) == 0
    assert holder.exists()
    assert listening.exists()
    assert "listens on a socket called s" in capsys.readouterr().out
    assert main(["clean"]) == 0  # a socket file that nobody listens on any more
    assert not listening.exists()


def test_shared_memory_goes_with_its_run(place: Path, dead: ProcessIdentity) -> None:
    shm = place.parent / "shm"
    gone = runtime_dir(place, "a", owner_of("demo-aaaaaa", "", dead))
    living = runtime_dir(place, "b", owner_of("demo-bbbbbb", 5, dead))
    names = [f"{gone.name}-x", f"{living.name}-x", "prorl-demo-aaaaaa-w", "prorl-demo-bbbbbb-w", "prorl-demo-eeeeee-w"]
    for name in [*names, "other"]:
        (shm / name).touch()
        os.utime(shm / name, (1, 1))
    found = {item.path.name: item.dead for item in find_leftovers([place], living=["demo-eeeeee"])}
    expected = [True, False, True, False, False]
    assert [found[name] for name in names] == expected
    assert "other" not in found


def test_a_directory_with_a_new_owner_is_not_removed(place: Path, dead: ProcessIdentity, me: ProcessIdentity) -> None:
    path = runtime_dir(place, "a", owner_of("demo-aaaaaa", "", dead))
    (item,) = find_leftovers([place])
    assert item.dead
    (path / "owner").write_text(owner_of("demo-aaaaaa", 5, me))
    assert leftovers.remove(item) == []
    assert path.exists()


def ended_run(root: Path, ending: Ending | None, kind: str = "slurm") -> RunDirectory:
    run = RunDirectory(root / "runs" / "day" / "demo-abcdef")
    for directory in (run.attempts, run.jobs, run.keys, run.rollouts, run.checkpoints):
        directory.mkdir(parents=True)
    run.begin_attempt(1)
    write_json(run.plan_file, {})
    run.config_file.write_text("run: {runtime_root: /tmp}\n")
    write_json(run.jobs / "job.json", JobRecord(kind, "5", "elsewhere", 0, time.time(), 1))
    if ending is not None:
        write_ending(run, AttemptEnding(ending, "", time.time()))
    (root / "runs" / "latest").symlink_to("day/demo-abcdef")
    register_run(run)
    return run


def test_an_ended_run_is_deleted_when_that_is_wanted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended_run(place.parent, Ending.STOPPED)
    assert main(["clean", run.run_id]) == 2  # nobody can be asked here
    assert "--yes" in capsys.readouterr().err
    assert main(["clean", run.run_id, "--dry-run"]) == 0
    assert run.path.exists()
    assert main(["clean", run.run_id, "--yes"]) == 0
    assert not run.path.exists()
    assert not (place.parent / "runs" / "latest").is_symlink()
    assert all_runs() == []


def test_a_directory_that_launch_did_not_make_is_not(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = place.parent / "precious"
    precious.mkdir()
    (precious / "config.yaml").write_text("a: 1\n")
    assert main(["clean", str(precious), "--yes"]) == 2
    assert "has attempts, jobs, keys, rollouts, checkpoints, plan.json" in capsys.readouterr().err
    monkeypatch.chdir(precious)
    for unset in ("", " "):
        assert main(["clean", unset, "--yes"]) == 2
    run = ended_run(place.parent, Ending.STOPPED)
    run.checkpoints.rename(precious / "checkpoints")
    run.checkpoints.symlink_to(precious / "checkpoints")
    assert main(["clean", run.run_id, "--yes"]) == 2
    assert (precious / "config.yaml").exists()
    assert run.path.exists()


def test_a_run_that_is_being_resumed_is_not(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended_run(place.parent, Ending.STOPPED)
    with run.lock("resume"):
        assert main(["clean", run.run_id, "--yes"]) == 2
    assert "prorl-hpc resume" in capsys.readouterr().err
    assert run.path.exists()


@pytest.mark.parametrize(("kind", "words"), [("slurm", "demo-abcdef is running"), ("local", "it is not known whether")])
def test_a_run_that_may_live_is_not(place: Path, capsys: pytest.CaptureFixture[str], kind: str, words: str) -> None:
    run = ended_run(place.parent, None, kind)
    assert main(["clean", str(run.path), "--yes"]) == 1
    assert words in capsys.readouterr().err
    assert run.path.exists()
