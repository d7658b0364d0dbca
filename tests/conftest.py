"""Fixtures that several rooms share: real Slurm clusters of this test session's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.slurm.private.base import PrivateSlurm, missing
from prorl_hpc.slurm.private.opening import open_cluster


def _cluster(kind: str, factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    if reason := missing(kind):
        pytest.skip(f"no private Slurm cluster ({kind}): {reason}")
    # Everything under the session's temporary directory is shared between the nodes, as is the environment.
    shared = [factory.getbasetemp(), Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parent.parent]
    directory = factory.mktemp(f"slurm-{kind}")
    command = [sys.executable, "-m", "prorl_hpc", "dev", "cluster", "start", str(directory)]
    command += ["--kind", kind, "--until-eof", *(word for path in shared for word in ("--share", str(path)))]
    if kind == "namespaced":
        command += ["--share-tmpfs", f"{factory.mktemp('small')}:8m"]  # a disk that tests can fill
    # It stops when its standard input closes, however this session ends.
    leash = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert leash.stdin is not None and leash.stdout is not None
    try:
        said = leash.stdout.readline()
        assert said.startswith("up in"), f"the private Slurm cluster did not start: see {directory}/log"
        yield open_cluster(directory)
    finally:
        leash.stdin.close()
        leash.wait(60)


@pytest.fixture(scope="session")
def slurm_mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """Four CPU and two GPU nodes, all on this host."""
    yield from _cluster("mini", tmp_path_factory)


@pytest.fixture(scope="session")
def slurm_namespaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """The same nodes, each with its own network, /tmp, /dev/shm and processes; needs root."""
    yield from _cluster("namespaced", tmp_path_factory)
