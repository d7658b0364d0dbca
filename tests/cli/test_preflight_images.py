"""Images are looked for before anything is allocated: the run's own, and those that rows ask for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.cli.preflight import preflight
from prorl_hpc.config.store import compose
from prorl_hpc.sandbox.protocol import SandboxNeeds
from prorl_hpc.tasks.file_quest import FileQuest


class ImageTask(FileQuest):
    """Every row has an image of its own, but for the last."""

    def sandbox(self, row: Mapping[str, Any]) -> SandboxNeeds:
        number = int(row["id"].rpartition("-")[2])
        return SandboxNeeds(image=f"docker://example/repo-{number}:1" if number < 6 else "")


class BrokenTask(FileQuest):
    def sandbox(self, row: Mapping[str, Any]) -> SandboxNeeds:
        return SandboxNeeds(image=row["image"])


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "image_tasks", sys.modules[__name__])
    monkeypatch.setenv("PRORL_HOME", str(tmp_path))


def errors_of(*overrides: str) -> list[str]:
    return [error for error in preflight(compose(["experiment=quick", *overrides])) if "image" in error]


def test_an_image_that_is_missing_is_named_with_the_command_that_brings_it() -> None:
    (error,) = errors_of("sandbox.image=docker://python:3.12-slim")
    assert (
        error.startswith("sandbox.image: ")
        and "prorl-hpc image pull docker://docker.io/library/python:3.12-slim" in error
    )
    assert errors_of("sandbox.image=docker://python:3.12-slim", "sandbox=local") == []
    assert errors_of() == []


def test_a_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.sif").write_bytes(b"\0" * 4096)
    (error,) = errors_of(f"sandbox.image={tmp_path}/broken.sif")
    assert "broken.sif" in error


def test_the_images_of_rows_are_looked_for_too() -> None:
    errors = errors_of("task.name=image_tasks:ImageTask", "task.train.size=7", "task.heldout.size=7")
    assert len(errors) == 4
    assert "row train-0-0" in errors[0] and "image pull docker://docker.io/example/repo-0:1" in errors[0]
    assert errors[-1].startswith("3 more images of 7") and "image convert" in errors[-1]


def test_a_task_that_cannot_say_what_it_needs_is_named() -> None:
    errors = errors_of("task.name=image_tasks:BrokenTask")
    assert errors and all("cannot say what row" in error and "KeyError: 'image'" in error for error in errors)
