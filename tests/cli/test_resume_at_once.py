"""Two verbs at one run at the same time, and signals while sbatch takes its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from fakes.runs import fake_config, fake_run

from prorl_hpc.__main__ import main
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm.endings import AttemptEnding, Ending, write_ending
from prorl_hpc.slurm.job import JobRecord, job_name

_DRIVER = """
import sys
import prorl_hpc.cli.resume as resume
from prorl_hpc.__main__ import main
resume.preflight = lambda config: []
sys.exit(main(sys.argv[1:]))
"""
_SBATCH = """#!/bin/sh
touch {0}/asked
until [ -e {0}/go ]; do sleep 0.05; done
[ ! -e {0}/refuse ] || {{ echo 'sbatch: error: no' >&2; exit 1; }}
touch {0}/queued
echo Submitted batch job 77
"""
_SQUEUE = """#!/bin/sh
[ -e {0}/queued ] && [ ! -e {0}/cancelled ] || exit 0
case "$*" in *-u*) echo '77|{1}';; *) echo '77|PENDING|None|N/A|1:00|{1}';; esac
"""


class Site:
    """A run that was stopped, and a Slurm whose sbatch waits for a file ``go``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = fake_config(root, slurm=True)
        config.model.path, config.run.stop_timeout_s = "/no/model", 5.0
        self.run = fake_run(config, {})
        record = JobRecord("slurm", "5", "login", 0, time.time(), 1, "", str(self.run.path))
        write_json(self.run.jobs / "job.json", record)
        write_ending(self.run, AttemptEnding(Ending.STOPPED, "", time.time()))
        (root / "bin").mkdir()
        self._put("sbatch", _SBATCH.format(root))
        self._put("squeue", _SQUEUE.format(root, job_name(self.run)))
        self._put("scancel", f"#!/bin/sh\necho $* > {root}/cancelled\n")
        self._put("scontrol", "#!/bin/sh\necho 'ClusterName = here'\n")
        for name in ("sacct", "srun"):
            self._put(name, "#!/bin/sh\n")

    def _put(self, name: str, text: str) -> None:
        (self.root / "bin" / name).write_text(text)
        (self.root / "bin" / name).chmod(0o755)

    def resume(self, *words: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "PATH": f"{self.root}/bin:{os.environ['PATH']}"}
        command = [sys.executable, "-c", _DRIVER, "resume", str(self.run.path), *words]
        return subprocess.Popen(
            command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def in_sbatch(self, *words: str) -> subprocess.Popen[str]:
        process = self.resume(*words)
        while not (self.root / "asked").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        return process

    def signalled_in_sbatch(self, number: signal.Signals) -> tuple[int, str]:
        """The exit code, and what was said."""
        process = self.in_sbatch("--detach")
        os.killpg(process.pid, number)
        time.sleep(0.2)
        (self.root / "go").touch()
        out, error = process.communicate(timeout=60)
        return process.returncode, out + error

    def record(self) -> JobRecord:
        return msgspec.json.decode((self.run.jobs / "job.json").read_bytes(), type=JobRecord)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("refused", [False, True])
def test_of_two_resumes_one_submits(site: Site, refused: bool) -> None:
    first = site.in_sbatch("--detach", "cluster.time_minutes=9")
    second = site.resume("--detach", "cluster.time_minutes=8")
    said = second.communicate(timeout=60)[1]
    assert second.returncode == 2, said
    assert f"`prorl-hpc resume` (process {first.pid} on " in said
    if refused:
        (site.root / "refuse").touch()
    (site.root / "go").touch()
    out, error = first.communicate(timeout=60)
    assert first.returncode == (2 if refused else 0), out + error
    attempts = [attempt.attempt for attempt in site.run.all_attempts()]
    minutes = site.run.load_config().cluster.time_minutes
    if refused:
        assert (attempts, minutes, site.record().job_id) == ([1], 5, "5")
    else:
        assert (attempts, minutes) == ([1, 2], 9)
        assert (site.record().job_id, site.record().cluster, site.record().attempt) == ("77", "here", 2)


def test_ctrl_c_during_sbatch_cancels_what_comes_back(site: Site) -> None:
    code, _ = site.signalled_in_sbatch(signal.SIGINT)
    assert code == 130
    assert (site.root / "cancelled").read_text() == "77\n"
    assert site.record().job_id == "77"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_during_sbatch_end_the_view_alone(site: Site, number: signal.Signals) -> None:
    code, said = site.signalled_in_sbatch(number)
    assert code == 128 + number
    assert "Slurm job 77 goes on" in said
    assert site.record().job_id == "77"
    assert not (site.root / "cancelled").exists()


def test_a_job_that_nobody_wrote_down_is_not_doubled(site: Site) -> None:
    (site.root / "queued").touch()
    process = site.resume("--detach")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert f"not as the job that it has on record: 77 ({job_name(site.run)})" in error


@pytest.mark.parametrize("given", ["", " ", "x" * 5000, f"./{'x' * 5000}"])
def test_no_name_of_a_run_is_a_traceback(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("status", "stop", "resume", "clean"):
        assert main([verb, given]) == 2
        assert len(capsys.readouterr().err) < 400


def test_settings_that_do_not_read_are_no_traceback(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.run.config_file.write_text("run: [")
    assert main(["resume", str(site.run.path)]) == 2
    assert "Mend " in capsys.readouterr().err
    assert RunDirectory.open(site.run.path).lock_file.read_text() == ""
