"""Run directories that others can reach, that two verbs are at, or that are damaged."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.config.run_lock import RunLocked
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.validation import validate


def made(tmp_path: Path) -> RunDirectory:
    config = ProrlConfig()
    config.run.root = str(tmp_path / "deep" / "runs")
    return RunDirectory.create(config)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return made(tmp_path)


def test_nobody_else_may_write_in_what_is_made_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = made(tmp_path)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.path, *list(run.path.parents)[:3])]
    assert modes == [0o700, 0o755, 0o755, 0o755]


def test_a_run_that_others_may_write_in_is_only_read(run: RunDirectory) -> None:
    run.path.chmod(0o770)
    with pytest.raises(RunDirectoryError, match="chmod go-w"):
        RunDirectory.open(run.path)
    assert RunDirectory.open(run.path, to_read=True).path == run.path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_run_is_only_read(run: RunDirectory) -> None:
    os.chown(run.path, 65534, 65534)
    with pytest.raises(RunDirectoryError, match="belongs to uid 65534"):
        RunDirectory.open(run.path)
    assert RunDirectory.open(run.path, to_read=True).path == run.path


def test_one_at_a_time_and_the_other_is_told_who(run: RunDirectory) -> None:
    with run.lock("resume") as lock:
        with (
            pytest.raises(RunLocked, match=rf"`prorl-hpc resume` \(process {os.getpid()} on ") as caught,
            run.lock("clean"),
        ):
            pass
        assert run.run_id in str(caught.value)
        lock.release()
        with run.lock("clean"):
            pass
    assert run.lock_file.read_text() == ""


def test_an_attempts_number_is_given_once(run: RunDirectory) -> None:
    run.begin_attempt(2, new=True)
    with pytest.raises(RunDirectoryError, match=r"attempt 2 of .* begun by somebody else"):
        run.begin_attempt(2, new=True)
    run.withdraw_attempt(2)
    assert (run.newest_attempt, len(run.all_attempts())) == (1, 1)
    assert (run.attempts / "latest").readlink() == Path("1")


@pytest.mark.parametrize("damage", ["none", "missing", "words", "directory"])
def test_the_newest_attempt_is_known_without_the_link(run: RunDirectory, damage: str) -> None:
    for number in range(2, 12):
        run.begin_attempt(number)
    latest = run.attempts / "latest"
    if damage != "none":
        latest.unlink()
    if damage == "words":
        latest.symlink_to("abc")
    if damage == "directory":
        latest.mkdir()
    assert run.newest_attempt == 11
    assert run.begin_attempt(12).attempt == run.newest_attempt == 12
    assert [path.name for path in run.attempts.glob(".latest*")] == []
    assert damage == "directory" or latest.readlink() == Path("12")


@pytest.mark.parametrize("content", [b"run: [", b"run: 3", b"\xff\xfe\x00", b"trainer: {steps: many}", b"nothing: 1"])
def test_settings_that_do_not_read_are_told_with_their_file(run: RunDirectory, content: bytes) -> None:
    run.config_file.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"(?s)cannot be read: .*Mend .*/config\.yaml"):
        run.load_config()


@pytest.mark.parametrize("root", ["/data/%j/runs", "/data/a\\b", "/data/a\nb", "runs\x07"])
def test_a_root_that_slurm_reads_otherwise_is_refused(root: str) -> None:
    config = ProrlConfig()
    config.run.root, config.model.path = root, "/m"
    (error,) = validate(config)
    assert error.startswith("run.root=")
    assert "without %, backslashes and control characters" in error
