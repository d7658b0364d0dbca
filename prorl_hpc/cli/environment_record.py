"""environment.json: with which packages, which code and which words a run was started."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import prorl_hpc
from prorl_hpc.config.store import conf_dir, user_conf_dirs

_MOST_FILES = 100


def environment_record(overrides: list[str]) -> dict[str, Any]:
    """What is needed to know later what ran. No environment variables: they can hold secrets."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "argv": sys.argv,
        "overrides": overrides,
        "working_directory": os.getcwd(),  # noqa: PTH109
        "python": sys.version,
        "platform": platform.platform(),
        "conf": [str(path) for path in (conf_dir(), *user_conf_dirs())],
        "git": git_state(Path(prorl_hpc.__file__).parent),
        "working_directory_git": git_state(Path.cwd()),
        "packages": {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]},
    }


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, and which tracked files differ from it; None outside a git checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=10)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.rstrip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no") or ""
    return {
        "root": git("rev-parse", "--show-toplevel"),
        "commit": commit,
        "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
        "changed": bool(changed),
        "changed_files": [line[3:] for line in changed.splitlines()][:_MOST_FILES],
    }
