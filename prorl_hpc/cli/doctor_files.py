"""Whether files behave as a run needs them: locks, atomic renames and links, speed, room, and what lies where."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.cli.findings import Finding, judged
from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.config.run_directory import RunDirectory, RunDirectoryError, filled_in
from prorl_hpc.sandbox.file_systems import NETWORK_TYPES, type_of

_GIB = 2**30
_SLOW_FSYNC_S, _SLOW_STAT_S = 0.05, 0.005
_SAMPLES = 8
_OTHER_STORAGE = "set run.root to another file system, or ask the admins how it is mounted"


@dataclass(frozen=True)
class FileCalls:
    """The calls that are tried; a test may have others."""

    flock: Callable[[int, int], None] = fcntl.flock
    lockf: Callable[[int, int], None] = fcntl.lockf
    replace: Callable[[Path, Path], None] = os.replace
    link: Callable[[Path, Path], None] = os.link
    fsync: Callable[[int], None] = os.fsync
    stat: Callable[[Path], object] = os.stat
    clock: Callable[[], float] = time.perf_counter


def nearest_directory(path: Path) -> Path:
    """``path`` itself, or the nearest directory above it that is there."""
    return next(p for p in (path, *path.parents) if p.is_dir())


def behaviour(root: Path, calls: FileCalls | None = None) -> Iterator[Finding]:
    """What a run directory under ``root`` would meet; leaves nothing there."""
    calls = calls or FileCalls()
    place = nearest_directory(root.absolute())
    kind = type_of(place) or "unknown"
    try:
        with tempfile.TemporaryDirectory(prefix=".prorl-doctor-", dir=place) as directory:
            wrong = [*_locks(Path(directory), calls), *_names(Path(directory), calls)]
            fsync_s, stat_s = _speed(Path(directory), calls)
    except OSError as error:
        found = f"{place} cannot be written: {error.strerror}"
        yield Finding("fail", "run directory", found, "set run.root to a directory of yours")
        return
    if wrong:
        yield Finding("fail", "run directory", f"{place} ({kind}): {'; '.join(wrong)}", _OTHER_STORAGE)
    else:
        yield Finding(
            "ok", "run directory", f"{place} ({kind}): locks, atomic renames, links and exclusive creation work"
        )
    yield judged(
        "file latency",
        f"{place}: fsync {fsync_s * 1000:.1f} ms, stat {stat_s * 1000:.2f} ms",
        "the journal writes and syncs on run.root at each result: a faster file system makes rollouts quicker",
        good=fsync_s < _SLOW_FSYNC_S and stat_s < _SLOW_STAT_S,
    )


def _locks(directory: Path, calls: FileCalls) -> Iterator[str]:
    path = directory / "lock"
    with path.open("w") as one, path.open("w") as other:
        try:
            calls.flock(one.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield f"no flock ({_told(error)})"
        else:
            try:
                calls.flock(other.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield "flock lets two in at once"
            except BlockingIOError:
                pass
            calls.flock(one.fileno(), fcntl.LOCK_UN)
        try:
            calls.lockf(one.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield f"no POSIX locks, which the journal's database needs ({_told(error)})"


def _names(directory: Path, calls: FileCalls) -> Iterator[str]:
    old, new = directory / "old", directory / "new"
    old.write_text("old")
    new.write_text("new")
    try:
        calls.replace(new, old)
        if old.read_text() != "new" or new.exists():
            yield "a rename over a file did not replace it"
    except OSError as error:
        yield f"no rename over a file ({_told(error)})"
    try:
        calls.link(old, directory / "link")
        calls.link(old, directory / "link")
        yield "a hard link replaces a file"
    except FileExistsError:
        pass
    except OSError as error:
        yield f"no hard links ({_told(error)})"
    try:
        os.close(os.open(old, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield "O_EXCL opens a file that is there"
    except FileExistsError:
        pass


def _told(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "") or str(error)


def _speed(directory: Path, calls: FileCalls) -> tuple[float, float]:
    """(median of fsync after a small write, median of stat), seconds."""
    fsyncs, stats = [], []
    path = directory / "speed"
    with path.open("wb", buffering=0) as file:
        for _ in range(_SAMPLES):
            began = calls.clock()
            file.write(b"x" * 512)
            calls.fsync(file.fileno())
            fsyncs.append(calls.clock() - began)
            began = calls.clock()
            calls.stat(path)
            stats.append(calls.clock() - began)
    return statistics.median(fsyncs), statistics.median(stats)


def room(run_root: str) -> Iterator[Finding]:
    """Free space where a run writes much."""
    for subject, path, least in (
        ("runs", Path(run_root).absolute(), 2.0),
        ("cache", prorl_home(), 2.0),
        ("shared memory", Path("/dev/shm"), 2.0),
        ("/tmp", Path("/tmp"), 1.0),
    ):
        place = nearest_directory(path)
        usage = shutil.disk_usage(place)
        found = f"{path}: {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
        cures = {
            "shared memory": "weights and tensors pass through it: ask for more memory, or the admin for a larger one"
        }
        yield judged(
            subject, found, cures.get(subject, "make room: weights need some"), good=usage.free >= least * _GIB
        )


def runtime_root(root: str) -> Iterator[Finding]:
    """Whether Unix sockets can be had in the node-local directory, TMPDIR beside it."""
    try:
        runtime = RunDirectory("/x").runtime_dir(root)
        RunDirectory.check_socket_length(runtime)
        place = filled_in(root)
        trial = tempfile.TemporaryDirectory(prefix=f"prorl-{os.getuid()}-d", dir=place)
        with trial as directory, socket.socket(socket.AF_UNIX) as one:
            one.bind(f"{directory}/s")
    except (RunDirectoryError, OSError) as error:
        told = str(error)
        yield Finding("fail", "socket paths", told, "set run.runtime_root to a short directory on the node's own disk")
        return
    kind = type_of(place)
    yield judged(
        "socket paths",
        f"{runtime} is short enough" + (f", but on {kind}, which is shared" if kind in NETWORK_TYPES else ""),
        "set run.runtime_root to a directory on the node's own disk: sockets of two nodes would be mixed up",
        good=kind not in NETWORK_TYPES,
    )
    tmpdir = os.environ.get("TMPDIR")
    if tmpdir:
        good = Path(tmpdir).is_dir() and os.access(tmpdir, os.W_OK) and len(os.fsencode(tmpdir)) <= 60
        found = tmpdir if Path(tmpdir).is_dir() else f"{tmpdir} is not here"
        yield judged("TMPDIR", found, "set TMPDIR to a short, writable directory on the node's own disk", good=good)


def network_places(kind_of: Callable[[Path], str] = type_of) -> Iterator[Finding]:
    """What is read often and lies on a network file system."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    places = {
        "HF_HOME": home,
        "PRORL_HOME": prorl_home(),
        "Python": Path(sys.prefix),
        "TMPDIR": Path(os.environ.get("TMPDIR", "/tmp")),
    }
    cures = {
        "Python": "imports of torch and vLLM take long from there: a container (cluster.container.image) starts faster",
        "TMPDIR": "set TMPDIR to a directory on the node's own disk",
    }
    far = {name: (path, kind) for name, path in places.items() if (kind := kind_of(path)).lower() in NETWORK_TYPES}
    if not far:
        yield Finding("ok", "caches", f"{', '.join(places)} are on local file systems")
    for name, (path, kind) in far.items():
        cure = cures.get(
            name, "many nodes that load a model at once are slow from there: copy it to node-local disk first"
        )
        yield Finding("warn", "caches", f"{name} {path} is on {kind}", cure)
