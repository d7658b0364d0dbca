"""The kit: our own Python, bash and git, brought into every sandbox read-only, so that any image works.

Built once per user into ``prorl_home()/kits/<key>`` and never changed: the key names all that it was made from. A kit
is written aside and renamed when it is whole; ``complete`` in it lists its files and their sizes, so one that lost
something is noticed and built again. Whoever comes while another builds waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.directories import words_of
from prorl_hpc.sandbox.file_systems import is_network
from prorl_hpc.sandbox.toolkit_build import Programs, distributions, fill

log = logging.getLogger(__name__)

BUILDER = 2
"""Counts changes of what a kit holds; part of the key."""
_COMPLETE = "complete"
_UNFINISHED_S = 3600.0


def ensure_kit(runtime_dir: Path, home: Path | None = None) -> Path:
    """This node's kit, built or copied when there is none. Blocks, the first time for some seconds.

    Where ``home`` (default: ``prorl_home()``) is on a network file system, it is a copy in ``runtime_dir``. SandboxError
    says what is missing or full.
    """
    programs, packages = Programs.of_this_node(), distributions()
    key = kit_key(programs, packages)
    kit = (home or prorl_home()) / "kits" / key
    try:
        place(kit, "a kit of this Python for sandboxes", lambda new: fill(new, programs, packages))
        if not is_network(kit):
            return kit
        copy = runtime_dir / f"kit-{key}"
        place(copy, f"this node's copy of {kit}", lambda new: shutil.copytree(kit, new, dirs_exist_ok=True))
        return copy
    except OSError as error:
        raise SandboxError(
            f"the kit for sandboxes cannot be made at {kit}: {words_of(error)}. It takes about 200 MB; PRORL_HOME chooses another place"
        ) from error


def kit_key(programs: Programs, packages: dict[str, metadata.Distribution]) -> str:
    """Names all that goes into a kit; nodes with the same software share one."""
    parts = [str(BUILDER), sys.version, platform.machine(), *platform.libc_ver()]
    for path in (programs.python, *programs.others.values()):
        info = path.stat()
        parts.append(f"{path} {info.st_size} {info.st_mtime_ns}")
    parts += sorted(f"{name} {package.version}" for name, package in packages.items())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def place(target: Path, what: str, make: Callable[[Path], object]) -> None:
    """Have ``target`` made by ``make`` (called with an empty directory), once, however many ask at the same time."""
    if is_whole(target):
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if is_whole(target):
            return
        log.info("making %s: %s", what, target)
        _remove_unfinished(target)
        began = time.monotonic()
        new = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            make(new)
            (new / _COMPLETE).write_text(json.dumps(_sizes(new)))
            new.chmod(0o755)
            _swap(new, target)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        log.info("made %s in %.1f s", what, time.monotonic() - began)


def _remove_unfinished(target: Path) -> None:
    """What builders that were killed left. The lock does not hold on every file system, so a young one may be alive."""
    for left in target.parent.glob(f".{target.name}-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _UNFINISHED_S:
                shutil.rmtree(left, ignore_errors=True)


def is_whole(kit: Path) -> bool:
    """Whether everything that was put there still is."""
    try:
        expected = json.loads((kit / _COMPLETE).read_text())
    except (OSError, ValueError):
        return False
    return bool(expected == _sizes(kit))


def _sizes(kit: Path) -> dict[str, int]:
    found = {str(path.relative_to(kit)): path.stat().st_size for path in kit.rglob("*") if path.is_file()}
    found.pop(_COMPLETE, None)
    return found


def _swap(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; a broken one there goes, and a whole one that somebody made meanwhile stays."""
    if target.exists() and not is_whole(target):
        log.warning("%s is broken: made again", target)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-broken-", dir=target.parent))
        target.rename(aside / target.name)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        new.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not is_whole(target):
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            # A file system without locks: two may build the same at once, and the first rename counts.
            log.warning("%s cannot be locked (%s)", path, error)
        yield
    finally:
        os.close(lock)
