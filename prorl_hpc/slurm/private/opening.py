"""Starts private clusters and finds those that were started."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from prorl_hpc.slurm.private.base import PrivateSlurm
from prorl_hpc.slurm.private.mini import MiniSlurm
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm
from prorl_hpc.slurm.private.shape import Shape


def make_cluster(directory: Path, shape: Shape) -> PrivateSlurm:
    """The cluster object; nothing is started."""
    return MiniSlurm(directory, shape) if shape.kind == "mini" else NamespacedSlurm(directory, shape)


def open_cluster(directory: Path) -> PrivateSlurm:
    """The cluster that was started in ``directory``. Raises ConfigError if none was."""
    return make_cluster(directory, Shape.read(directory))


def start_cluster(directory: Path, shape: Shape) -> PrivateSlurm:
    """Start it, or leave nothing of it; prints how long it took and how to speak to it."""
    shape.check()
    directory.mkdir(parents=True, exist_ok=True)
    cluster = make_cluster(directory, shape)
    cluster.stop()  # one that was left in this directory
    shape.write(directory)
    begun = time.monotonic()
    try:
        cluster.start()
        print(f"up in {time.monotonic() - begun:.2f} s\nexport SLURM_CONF={cluster.conf}", flush=True)
    except BaseException:  # who asked may be gone: then nobody reads it, and nobody would stop it
        cluster.stop()
        raise
    return cluster


def hold_cluster(directory: Path, shape: Shape) -> int:
    """Start it, and stop it when standard input ends: the leash of a test session, which closes however that ends.

    Two processes hold it, each of which stops it when the other is gone, so that a SIGKILL of either leaves nothing.
    The inner one has a session of its own, since terminals and `timeout` end whole process groups.
    """
    outer_lives, outer_end = os.pipe()
    inner = os.fork()
    if inner == 0:
        os.close(outer_end)
        os.setsid()
        os._exit(_hold(directory, shape, outer_lives))
    os.close(outer_lives)
    for number in (signal.SIGINT, signal.SIGTERM):  # the inner one hears of it by the pipe
        signal.signal(number, lambda *_: os.close(outer_end))
    _, status = os.waitpid(inner, 0)
    if os.WIFSIGNALED(status):
        make_cluster(directory, shape).stop()
    return os.waitstatus_to_exitcode(status)


def _hold(directory: Path, shape: Shape, outer_lives: int) -> int:
    try:
        cluster = start_cluster(directory, shape)
    except Exception as error:
        print(f"the private cluster in {directory} did not start: {error}", file=sys.stderr, flush=True)
        return 1
    try:
        while True:
            ended, _, _ = select.select([0, outer_lives], [], [])
            if any(not os.read(fd, 4096) for fd in ended):
                return 0
    finally:
        cluster.stop()
