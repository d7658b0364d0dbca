"""File systems that do not behave, and places that are far away."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_hpc.cli.doctor_files import FileCalls, behaviour, network_places, runtime_root
from prorl_hpc.cli.findings import Finding


def refuse(number: int) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def nothing(*arguments: object) -> None:
    """As on a file system that takes every lock for granted."""


def said(path: Path, calls: FileCalls) -> dict[str, Finding]:
    found = {finding.subject: finding for finding in behaviour(path, calls)}
    assert list(path.iterdir()) == []
    return found


def test_a_good_directory_is_left_as_it_was(tmp_path: Path) -> None:
    found = said(tmp_path, replace(FileCalls(), clock=lambda: 0.0))
    assert {finding.grade for finding in found.values()} == {"ok"}


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (replace(FileCalls(), flock=refuse(errno.ENOLCK)), "no flock (ENOLCK)"),
        (replace(FileCalls(), flock=nothing), "flock lets two in at once"),
        (replace(FileCalls(), lockf=refuse(errno.ENOTSUP)), "no POSIX locks"),
        (replace(FileCalls(), link=refuse(errno.EPERM)), "no hard links (EPERM)"),
        (replace(FileCalls(), link=nothing), "a hard link replaces a file"),
        (replace(FileCalls(), replace=refuse(errno.EXDEV)), "no rename over a file (EXDEV)"),
        (replace(FileCalls(), replace=nothing), "a rename over a file did not replace it"),
    ],
)
def test_what_files_cannot_do_fails_and_is_named(tmp_path: Path, calls: FileCalls, told: str) -> None:
    found = said(tmp_path, calls)["run directory"]
    assert found.grade == "fail" and told in found.found and "run.root" in found.cure


def test_slow_storage_is_a_warning(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    found = said(tmp_path, replace(FileCalls(), clock=lambda: next(ticks) * 0.2))["file latency"]
    assert found.grade == "warn" and "fsync 200.0 ms" in found.found


def test_a_directory_that_cannot_be_written_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_hpc.cli.doctor_files._locks", refuse(errno.EDQUOT))
    (finding,) = behaviour(tmp_path)
    assert finding.grade == "fail" and "cannot be written" in finding.found


def test_what_lies_on_a_network_file_system_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    found = list(network_places(lambda path: "nfs4" if path.name == "hf" else "ext4"))
    assert [finding.grade for finding in found] == ["warn"] and f"HF_HOME {tmp_path}/hf is on nfs4" in found[0].found
    (good,) = network_places(lambda path: "ext4")
    assert good.grade == "ok"


def test_runtime_roots_that_are_long_missing_or_full_of_variables_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_DIR", raising=False)
    for root in (f"/tmp/{'x' * 80}", str(tmp_path / "not-there")[:40], "$NO_SUCH_DIR"):
        assert next(runtime_root(root)).grade == "fail"
    monkeypatch.setenv("TMPDIR", "/no/such/directory")
    found = {finding.subject: finding for finding in runtime_root("/tmp")}
    assert found["socket paths"].grade == "ok" and found["TMPDIR"].grade == "warn"
