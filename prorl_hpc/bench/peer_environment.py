"""Peers live in virtual environments of their own under the user's cache: none is a dependency of ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.messages.errors import RunError

_INSTALL_S = 900.0


def peer_environment(package: str, version: str, say: Callable[[str], None]) -> Path:
    """The environment with ``package``, made with pip when it is missing. RunError says why it cannot be."""
    directory = prorl_home() / "peers" / f"{package}-{version}"
    complete = directory / "complete"
    if not complete.exists():
        say(f"installing {package} {version} in {directory} (once)")
        directory.parent.mkdir(parents=True, exist_ok=True)
        _command(package, sys.executable, "-m", "venv", "--clear", str(directory))
        pip = (str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet")
        _command(package, *pip, f"{package}=={version}")
        complete.touch()
    return directory


def _command(package: str, *words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{package} cannot be installed: {error}") from error
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no word"]
        raise RunError(
            f"{package} cannot be installed: {' '.join(words[:4])} … ended with {done.returncode}: {last[0]}"
        )
