"""Which run a word on the command line means."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from prorl_hpc.cli.run_choice import chosen_run, link_latest
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.slurm.job import JobRecord
from prorl_hpc.slurm.run_index import register_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDirectory]:
    """Two runs elsewhere, jobs 41 and 42."""
    monkeypatch.setenv("PRORL_HOME", str(tmp_path / "home"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    made = []
    for name, job in (("first", 41), ("second", 42)):
        config = ProrlConfig()
        config.run.name, config.run.root = name, str(tmp_path / "runs")
        run = RunDirectory.create(config)
        write_json(run.jobs / "job.json", JobRecord("slurm", str(job), "host", 0, time.time(), 1))
        register_run(run)
        made.append(run)
    return made


def test_all_the_ways_to_name_a_run(runs: list[RunDirectory]) -> None:
    first, second = runs
    for given in (str(first.path), first.run_id, first.run_id.rpartition("-")[2], "41", "41+1"):
        assert chosen_run(given).path == first.path, given
    assert chosen_run(None).path == chosen_run("latest").path == second.path


def test_a_name_means_the_only_run_that_has_it(runs: list[RunDirectory]) -> None:
    assert chosen_run("first").path == runs[0].path
    config = ProrlConfig()
    config.run.name, config.run.root = "first", str(runs[0].path.parents[1])
    again = RunDirectory.create(config)
    register_run(again)
    with pytest.raises(RunDirectoryError) as caught:
        chosen_run("first")
    assert f"first is the name of 2 runs: give the id of one, newest first: {again.run_id}, " in str(caught.value)


def test_the_latest_run_here_comes_before_the_newest_elsewhere(runs: list[RunDirectory]) -> None:
    Path("runs").mkdir()
    link_latest(runs[0], Path("runs"))
    assert chosen_run(None).path == chosen_run("latest").path == runs[0].path


def test_a_run_that_the_index_lacks_is_found_under_runs_here(runs: list[RunDirectory]) -> None:
    old = Path("runs/2026-01-01/old-abcdef")
    old.mkdir(parents=True)
    (old / "config.yaml").touch()
    assert chosen_run("old-abcdef").path == chosen_run("abcdef").path == old.absolute()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("zzz", "Your runs, newest first: second-"),
        ("99", "there is no run 99"),
        ("./nowhere", "is not there"),
        (".", "is not a run directory: it has no config.yaml"),
    ],
)
def test_what_is_no_run_is_told_with_the_nearest(runs: list[RunDirectory], given: str, words: str) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        chosen_run(given)
    assert words in str(caught.value)


def test_a_typo_is_answered_with_the_nearest_run(runs: list[RunDirectory]) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        chosen_run(runs[0].run_id.replace("first", "frist"))
    assert f"Did you mean {runs[0].run_id}?" in str(caught.value)


def test_a_user_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError, match="index of your runs is empty"):
        chosen_run(None)


def test_one_name_in_two_places_asks_for_the_directory(runs: list[RunDirectory], tmp_path: Path) -> None:
    twin = RunDirectory(tmp_path / "other" / "day" / runs[0].run_id)
    twin.path.mkdir(parents=True)
    twin.config_file.touch()
    register_run(twin)
    with pytest.raises(RunDirectoryError, match="more than one run"):
        chosen_run(runs[0].run_id)
