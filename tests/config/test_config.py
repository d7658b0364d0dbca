"""The schema, its YAML and the names of a run's files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hydra.errors import HydraException

from prorl_hpc.config.reference import reference
from prorl_hpc.config.run_directory import SOCKET_PATH_LIMIT, RunDirectory, RunDirectoryError
from prorl_hpc.config.store import compose, load, save

ROOT = Path(__file__).parents[2]


def test_the_reference_in_docs_is_the_schemas() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), (
        "docs/configuration.md is out of date: python -m prorl_hpc.config.reference > docs/configuration.md"
    )


@pytest.mark.parametrize(
    "overrides", [[], ["cluster=slurm"], ["experiment=quick"], ["experiment=quick", "cluster=slurm"]]
)
def test_a_composed_config_survives_its_file(overrides: list[str], tmp_path: Path) -> None:
    config = compose(overrides)
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("override", ["trainer.stps=3", "trainer.steps=many", "cluster=moon", "engine.kind=[1]"])
def test_unknown_keys_and_wrong_types_are_refused(override: str) -> None:
    with pytest.raises(HydraException):
        compose([override])


def test_an_experiment_wins_over_the_defaults_and_an_override_over_both() -> None:
    assert compose(["experiment=quick"]).run.name == "quick"
    assert compose(["experiment=quick", "run.name=mine"]).run.name == "mine"


def test_run_directories_are_private_and_never_collide(tmp_path: Path) -> None:
    config = compose([f"run.root={tmp_path}"])
    runs = [RunDirectory.create(config) for _ in range(20)]
    assert len({run.path for run in runs}) == 20
    for path in (runs[0].path, runs[0].keys, runs[0].state):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert RunDirectory.open(runs[0].path).load_config() == config


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no config\.yaml"):
        RunDirectory.open(tmp_path)


def test_runtime_directory_is_short_private_and_ours(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / ("long" * 40) / "run")
    path = run.make_runtime_dir("/tmp")
    try:
        assert len(str(path)) < SOCKET_PATH_LIMIT - 32
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert run.make_runtime_dir("/tmp") == path
        assert run.runtime_dir("/tmp", "cpu01") != run.runtime_dir("/tmp", "cpu02")
        path.chmod(0o755)
        with pytest.raises(RunDirectoryError, match="not a private directory"):
            run.make_runtime_dir("/tmp")
    finally:
        path.rmdir()


def test_a_long_runtime_root_is_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 60) / ("y" * 60)
    root.mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=r"run\.runtime_root"):
        RunDirectory(tmp_path / "run").make_runtime_dir(str(root))
