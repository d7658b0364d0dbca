"""Who runs a sandbox in the tests: whoever runs the tests and, where that is root, an ordinary user as well."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import prorl_hpc
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.toolkit import ensure_kit

DRIVER = Path(__file__).with_name("sandbox_driver.py")
NEEDED = ("msgspec", "packaging", "psutil", "ptyprocess")
SMALL = {"max_processes": 64, "max_memory_mib": 256, "max_disk_mib": 32, "max_file_mib": 512, "warm": 0}
"""Limits at which an attack is over soon, and harms nobody else on the machine."""


@dataclass(frozen=True)
class Person:
    """``directory``: of their own, theirs to write."""

    name: str
    directory: Path
    prefix: tuple[str, ...]
    python: str
    path: str
    kit: str

    def run(self, kind: str, steps: list[list[Any]], *, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """The steps' results (see sandbox_driver.py); skips, with the reason, where containers do not work."""
        runtime_dir = self.directory / f"prorl-{self.uid}-t"
        job = {"kind": kind, "runtime_dir": str(runtime_dir), "config": SMALL, "kit": self.kit, "steps": steps}
        own = {"PATH": os.environ["PATH"], "HOME": str(self.directory), "PYTHONPATH": self.path}
        done = subprocess.run(
            [*self.prefix, self.python, str(self.driver)],
            input=json.dumps(job),
            env={**own, **(env or {})},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        if "unprepared" in answer:
            pytest.skip(f"{kind} does not work on this machine for {self.name}: {answer['unprepared']}")
        assert list(runtime_dir.rglob("*")) == []
        return answer["results"]

    @property
    def uid(self) -> int:
        return self.directory.stat().st_uid

    @property
    def driver(self) -> Path:
        return self.directory / DRIVER.name if self.prefix else DRIVER

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """A process of theirs on the node."""
        return subprocess.Popen([*self.prefix, *argv], cwd=self.directory)


@contextmanager
def person(name: str) -> Iterator[Person]:
    """``me`` or ``ordinary``."""
    # A short path: sockets are below it.
    directory = Path(tempfile.mkdtemp(prefix="prorl-p", dir="/tmp"))
    try:
        yield _me(directory) if name == "me" else _ordinary(directory)
    finally:
        shutil.rmtree(directory)


def _kit() -> Path:
    try:
        return ensure_kit(Path(tempfile.gettempdir()))
    except SandboxError as error:
        pytest.skip(f"no kit for sandboxes: {error}")


def _me(directory: Path) -> Person:
    package = Path(prorl_hpc.__file__).parents[1]
    return Person("me", directory, (), sys.executable, str(package), str(_kit()))


def _ordinary(directory: Path) -> Person:
    """With copies of all that is needed, since what is root's may be closed to others."""
    if os.getuid() != 0:
        pytest.skip("whoever runs the tests is an ordinary user already")
    user = pwd.getpwnam("nobody")
    prefix = ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "env")
    # ``env``: setpriv itself starts programs with powers of root's that are left to it.
    python = _python_for(prefix)
    shutil.copytree(Path(prorl_hpc.__file__).parent, directory / "path/prorl_hpc", ignore=_NO_CACHES)
    for name in NEEDED:
        for file in metadata.distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = directory / "path" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    shutil.copytree(_kit(), directory / "kit", copy_function=_link_or_copy, symlinks=True)
    shutil.copy(DRIVER, directory)
    os.chown(directory, user.pw_uid, user.pw_gid)
    directory.chmod(0o755)
    return Person("ordinary", directory, prefix, python, str(directory / "path"), str(directory / "kit"))


_NO_CACHES = shutil.ignore_patterns("__pycache__")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _python_for(prefix: tuple[str, ...]) -> str:
    """One of this version that they can start: what is compiled for it must fit."""
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/python{wanted}", f"/usr/local/bin/python{wanted}"):
        try:
            if subprocess.run([*prefix, python, "-c", ""], capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip(f"no Python {wanted} that an ordinary user can start")
