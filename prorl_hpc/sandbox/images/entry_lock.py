"""Only one process of the cluster makes an image of one name, whatever file system the cache lies on.

flock and fcntl locks are not to be had everywhere (Lustre without ``-o flock``) or hold on one node only (Lustre with
``localflock``, some NFS mounts), and the second fails silently. What is atomic everywhere is the rename of a directory:
a lock is a directory with its owner's file in it, renamed into place; the rename fails where there is one already.
The image is written within it, so whoever breaks the lock of a dead owner removes what it left, too.

A dead owner is known at once on its own node (by process id and start time), elsewhere by the file ``beat`` that
stopped changing for STALE_S as the waiter's own clock has it, so nodes' clocks do not matter. If two waiters break one
dead lock in the same moment, the worst is that the image is made twice: what is published is whole either way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prorl_hpc.messages.errors import SandboxError

STALE_S = 120.0
"""An owner on another node that shows no beat for so long is dead: NFS clients may see a file 60 s late."""
BEAT_S = 10.0
POLL_S = 1.0
TELL_S = 15.0


def lock_path(directory: Path, name: str) -> Path:
    return directory / f".{name}.lock"


@contextlib.contextmanager
def entry_lock(
    directory: Path, name: str, progress: Callable[[str], None], stop: threading.Event | None = None
) -> Iterator[Path]:
    """Hold the lock of ``name``; yields the path of a file to write aside, which is gone afterwards unless renamed.

    Waits for another owner, and tells ``progress`` for whom. SandboxError when ``stop`` is set meanwhile.
    """
    path = lock_path(directory, name)
    token = uuid.uuid4().hex
    _wait(path, token, progress, stop or threading.Event())
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path / f"beat-{token}", ended), name=f"lock of {name}", daemon=True)
    beat.start()
    try:
        yield path / f"{token}.sif"
    finally:
        ended.set()
        beat.join()
        if _owner(path).get("token") == token:
            remove_aside(path)


def lock_owner(path: Path) -> str:
    """The token of who holds the lock now, which is the stem of the file it writes; empty when nobody does."""
    return str(_owner(path).get("token", ""))


def break_dead(path: Path) -> bool:
    """Remove a lock, and what was written within it, when its owner was a process of this node and is dead."""
    owner = _owner(path)
    return bool(owner) and _is_dead_here(owner) and _break(path, owner)


def remove_aside(path: Path) -> None:
    """Remove a directory so that it is gone at once for all others."""
    trash = path.with_name(f".trash-{uuid.uuid4().hex}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return  # another was faster
    shutil.rmtree(trash, ignore_errors=True)  # what stays is swept with the other .trash-*


def _wait(path: Path, token: str, progress: Callable[[str], None], stop: threading.Event) -> None:
    watch: tuple[object, float] = (None, 0.0)
    told = 0.0
    while not _take(path, token):
        owner = _owner(path)
        seen = (owner.get("token"), _read(path / f"beat-{owner.get('token')}"))
        now = time.monotonic()
        if seen != watch[0]:
            watch = (seen, now)
        if _is_dead_here(owner) or now - watch[1] > STALE_S:
            if _break(path, owner):
                progress(f"process {owner.get('pid')} on {owner.get('host')} died over it: starting anew")
            continue
        if now - told > TELL_S:
            written = sum(f.stat().st_size for f in path.glob("*.sif")) if told else 0
            progress(f"waiting for process {owner.get('pid')} on {owner.get('host')}, which makes it{_mib(written)}")
            told = now
        if stop.wait(POLL_S):
            raise SandboxError("stopped while waiting for another process that makes this image")


def _mib(size: int) -> str:
    return f" ({size >> 20} MiB so far)" if size else ""


def _take(path: Path, token: str) -> bool:
    aside = path.with_name(f".new-{token}")
    try:
        aside.mkdir(mode=0o755)
        (aside / "owner.json").write_text(json.dumps({"token": token, **_me()}))
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise SandboxError(
            f"the image cache {path.parent} cannot be written: {error.strerror or error}. Make room or choose another "
            "directory that all nodes see with $PRORL_HOME"
        ) from error
    with contextlib.suppress(OSError):  # there is one already; or over NFS an answer was lost and it is ours
        aside.rename(path)
    if _owner(path).get("token") == token:
        return True
    shutil.rmtree(aside, ignore_errors=True)
    return False


def _break(path: Path, owner: dict[str, Any]) -> bool:
    if _owner(path) != owner:
        return False  # it has another owner meanwhile
    remove_aside(path)
    return True


def _beat(file: Path, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(0 if not number else BEAT_S):
        number += 1
        with contextlib.suppress(OSError):  # a full disk, or the lock was taken over: the publication will tell
            file.write_text(str(number))


def _owner(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(_read(path / "owner.json") or "{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _me() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "uid": os.getuid(), "pid": pid, "started": _started(pid)}


def _boot() -> str:
    """Of this node's kernel and PID namespace: where process ids mean the same."""
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{_read(Path('/proc/sys/kernel/random/boot_id')).strip()} {namespace}"


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty when there is none, or only its zombie."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else ""


def _is_dead_here(owner: dict[str, Any]) -> bool:
    """Another user's process may be hidden from us (hidepid): its beat alone tells."""
    here = owner.get("boot") == _boot() and owner.get("uid") == os.getuid()
    return here and owner.get("started") != _started(int(owner.get("pid", 0)))
