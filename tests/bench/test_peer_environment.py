"""The environment with TRL: made of what it needs alone, behind it the packages of this one."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import pytest

import prorl_hpc
from prorl_hpc.bench import peer_environment
from prorl_hpc.messages.errors import RunError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """What pip was asked for; nothing is installed. A package list of the test's own."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(peer_environment, "_pip_install", lambda package, directory, *what: asked.append(what))
    # Without pip, which takes long to install and has nothing to do here.
    monkeypatch.setattr(peer_environment, "_make", lambda package, directory: venv.create(directory, clear=True))
    monkeypatch.setattr(peer_environment, "TRL_PACKAGES", tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("trl==1.0\n")
    monkeypatch.setattr(peer_environment.importlib.util, "find_spec", lambda name: object())
    return asked


def test_it_sees_the_packages_of_this_environment_and_is_made_once(
    installed: list[tuple[str, ...]], tmp_path: Path
) -> None:
    said: list[str] = []
    directory = peer_environment.trl_environment(said.append, tmp_path / "trl")
    assert installed == [("--no-deps", "-r", str(tmp_path / "list.txt"))]
    code = "import msgspec, prorl_hpc; print(msgspec.__file__, prorl_hpc.__file__, sep='\\n')"
    done = subprocess.run([directory / "bin" / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [msgspec.__file__, prorl_hpc.__file__], done.stderr
    peer_environment.trl_environment(said.append, tmp_path / "trl")
    assert len(installed) == len(said) == 1

    (tmp_path / "list.txt").write_text("trl==1.1\n")
    peer_environment.trl_environment(said.append, tmp_path / "trl")
    assert len(installed) == 2, "another list, another environment"


def test_without_torch_it_says_what_to_install(
    installed: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peer_environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"torch and transformers.*extra \[train\]"):
        peer_environment.trl_environment(print, tmp_path / "trl")
    assert installed == [] and not (tmp_path / "trl").exists()


def test_an_installation_that_fails_is_told_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"TRL cannot be installed: .*: no such thing"):
        peer_environment._command("TRL", sys.executable, "-c", "raise SystemExit('no such thing')")
