"""Control groups: the kernel's own limits on memory, processes and CPU of a sandbox, where this user may set them.

That is: root's everywhere that the hierarchies can be written (version 1 or 2), and in version 2 everybody's who was
given a subtree (``Delegate=yes`` of systemd, some containers). Each sandbox gets two groups, one in the other: the
limits are on the outer, the processes in the inner, which is all that a process of the sandbox could ever see of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.messages.errors import SandboxError

WANTED = ("memory", "pids", "cpu")
_INNER = "in"
_CPU_PERIOD_US = 100_000
_REMOVE_S = 5.0
"""How long the processes of a group may take to end once they are killed."""


@dataclass(frozen=True)
class GroupLimits:
    """0: no limit."""

    memory_mib: int = 0
    processes: int = 0
    cpus: float = 0.0


class Tree:
    """The two calls that are no reading or writing of files, so that a test can have a hierarchy of its own."""

    def make(self, path: Path) -> None:
        path.mkdir(mode=0o755)

    def remove(self, path: Path) -> None:
        path.rmdir()


@dataclass(frozen=True)
class _Place:
    """A directory in which groups can be made, and for what."""

    path: Path
    version: int
    controllers: tuple[str, ...]


class Group:
    """One sandbox's."""

    def __init__(self, name: str, places: list[_Place], limits: GroupLimits, tree: Tree) -> None:
        self._tree = tree
        self._places = places
        self._paths = [place.path / name for place in places]
        self._limits = limits
        self._events: int | None = None
        try:
            for place, path in zip(places, self._paths, strict=True):
                tree.make(path)
                if place.version == 2:
                    _write(path / "cgroup.subtree_control", " ".join(f"+{name}" for name in place.controllers))
                for controller in place.controllers:
                    _set(path, place.version, controller, limits)
                tree.make(path / _INNER)
                if "memory" in place.controllers:
                    # Version 2 counts for the whole subtree, version 1 for the group of the killed process.
                    counter = path / "memory.events" if place.version == 2 else path / _INNER / "memory.oom_control"
                    self._events = os.open(counter, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.remove()
            raise SandboxError(f"its control group cannot be made: {error}") from error

    def add(self, pid: int) -> None:
        """Put a process, and what it starts from now on, under the limits. SandboxError when that is refused."""
        for path in self._paths:
            try:
                _write(path / _INNER / "cgroup.procs", str(pid))
            except OSError as error:
                raise SandboxError(f"process {pid} cannot be put into its control group: {error}") from error

    def oom_kills(self) -> int:
        """How often the kernel has killed a process here because the memory was used up."""
        if self._events is None:
            return 0
        for line in os.pread(self._events, 4096, 0).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                return int(value)
        return 0  # Linux before 4.13

    def memory_reason(self) -> str:
        return f"the sandbox used all of its {self._limits.memory_mib} MiB of memory"

    def remove(self) -> None:
        """Kill what is left in it, and remove it; SandboxError when something stays."""
        events, self._events = self._events, None
        if events is not None:
            os.close(events)
        for path in self._paths:
            _remove(path, self._tree)


class Cgroups:
    """The groups that can be made here; none, unless they were found."""

    def __init__(self, places: Sequence[_Place] = (), tree: Tree | None = None) -> None:
        self._places = list(places)
        self._tree = tree or Tree()

    @classmethod
    def find(cls, proc: Path = Path("/proc/self"), tree: Tree | None = None) -> Cgroups:
        """Look where this process is and what it may do there; each place is tried. Without any, no limit holds."""
        tree = tree or Tree()
        places: list[_Place] = []
        held: set[str] = set()
        for place in _candidates(proc, tree):
            controllers = tuple(name for name in place.controllers if name not in held)
            place = _Place(place.path, place.version, controllers)
            if controllers and _works(place, tree):
                places.append(place)
                held |= set(controllers)
        return cls(places, tree)

    def holding(self, controller: str) -> str:
        """``cgroup v1`` or ``cgroup v2``; empty where ``controller`` (memory, pids, cpu) cannot be had."""
        return next((f"cgroup v{place.version}" for place in self._places if controller in place.controllers), "")

    def make(self, name: str, limits: GroupLimits, record: Path | None = None) -> Group | None:
        """A group with these limits; None where there are no groups. SandboxError when it is refused after all.
        Its directories are written into ``record``, for whoever finds it after this process."""
        if not self._places:
            return None
        if record is not None:
            record.write_text("".join(f"{place.path / name}\n" for place in self._places))
        return Group(name, self._places, limits, self._tree)


def group_name(box: Path) -> str:
    """Of the sandbox with this directory: ``<runtime directory>.<holding>.<box>``."""
    runtime_dir = box.parent.parent.name
    prefix = _prefix()
    return f"{runtime_dir if runtime_dir.startswith(prefix) else prefix + runtime_dir}.{box.parent.name}.{box.name}"


def remove_recorded(record: Path, tree: Tree | None = None) -> None:
    """Remove the groups of a dead process, with all that is in them. SandboxError when something stays."""
    for line in record.read_text().splitlines():
        path = Path(line)
        if path.name.startswith(_prefix()) and (path / "cgroup.procs").exists():
            _remove(path, tree or Tree())


def _prefix() -> str:
    return f"prorl-{os.getuid()}-"


def _candidates(proc: Path, tree: Tree) -> Iterator[_Place]:
    """Places that may do, the better ones first."""
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    for line in (proc / "mountinfo").read_text().splitlines():
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        root, mount = fields[3], Path(fields[4])
        if kind == "cgroup2" and "" in own:
            yield from _version_2(mount, _below(mount, root, own[""]), tree)
        elif kind == "cgroup":
            for controllers, path in own.items():
                names = controllers.split(",")
                wanted = tuple(name for name in WANTED if name in names and name in options)
                if wanted:
                    yield _Place(_below(mount, root, path), 1, wanted)


def _below(mount: Path, root: str, path: str) -> Path:
    """Where the group ``path`` of a hierarchy is found, of which ``root`` is mounted."""
    inside = Path(path)
    return mount / (inside.relative_to(root) if inside.is_relative_to(root) else inside.relative_to("/"))


def _version_2(mount: Path, own: Path, tree: Tree) -> Iterator[_Place]:
    """Our own group, or the nearest one above it whose subtree is ours to arrange. None in a step of Slurm's: it ends,
    signals and counts the processes of its own groups, not of groups below them."""
    if in_slurm_step(own):
        return
    for path in (own, *own.parents):
        if not path.is_relative_to(mount) or not os.access(path / "cgroup.procs", os.W_OK):
            return
        if path == own:
            _open_own(own, tree)
        enabled = (path / "cgroup.subtree_control").read_text().split()
        controllers = tuple(name for name in WANTED if name in enabled)
        if controllers:
            yield _Place(path, 2, controllers)


def in_slurm_step(group: Path) -> bool:
    """Whether a group of version 2 is, or lies in, one that Slurm made for a step: ``…/job_7/step_0/user/task_0``."""
    names = group.parts
    return any(a.startswith("job_") and b.startswith("step_") for a, b in itertools.pairwise(names))


def _open_own(own: Path, tree: Tree) -> None:
    """Hand controllers on to groups below ours. A group that does so may hold no processes itself, so those that are
    in it, all of this user's, go into one below; its limits keep holding for them."""
    available = (own / "cgroup.controllers").read_text().split()
    missing = [name for name in WANTED if name in available]
    missing = [name for name in missing if name not in (own / "cgroup.subtree_control").read_text().split()]
    if not missing:
        return
    others = own / f"{_prefix()}others"
    with contextlib.suppress(OSError):  # then the controllers stay away, which the caller sees
        pids = (own / "cgroup.procs").read_text().split()
        if any(Path(f"/proc/{pid}").stat().st_uid != os.getuid() for pid in pids):
            return
        if not others.exists():
            tree.make(others)
        for pid in pids:
            _write(others / "cgroup.procs", pid)
        for name in missing:
            _write(own / "cgroup.subtree_control", f"+{name}")


def _works(place: _Place, tree: Tree) -> bool:
    """Whether a group with limits can be made there."""
    try:
        group = Group(f"{_prefix()}trial-{os.getpid()}", [place], GroupLimits(64, 16, 1.0), tree)
    except SandboxError:
        return False
    group.remove()
    return True


def _set(path: Path, version: int, controller: str, limits: GroupLimits) -> None:
    if controller == "memory" and limits.memory_mib:
        size = str(limits.memory_mib << 20)
        if version == 2:
            _write(path / "memory.max", size)
            _write(path / "memory.swap.max", "0", optional=True)
        else:
            _write(path / "memory.limit_in_bytes", size)
            _write(path / "memory.memsw.limit_in_bytes", size, optional=True)  # memory and swap together
    elif controller == "pids" and limits.processes:
        _write(path / "pids.max", str(limits.processes))
    elif controller == "cpu" and limits.cpus:
        quota = str(max(1000, int(limits.cpus * _CPU_PERIOD_US)))
        if version == 2:
            _write(path / "cpu.max", f"{quota} {_CPU_PERIOD_US}")
        else:
            _write(path / "cpu.cfs_period_us", str(_CPU_PERIOD_US))
            _write(path / "cpu.cfs_quota_us", quota)


def _write(path: Path, text: str, *, optional: bool = False) -> None:
    """``optional``: where the file is there (without accounting of swap, it is not)."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    except FileNotFoundError:
        if optional:
            return
        raise
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _remove(path: Path, tree: Tree) -> None:
    """Kill all in it and below (a sandbox's root may have made groups there), and remove it."""
    give_up = time.monotonic() + _REMOVE_S
    while path.exists():
        groups = [Path(directory) for directory, _, _ in os.walk(path, topdown=False)]
        try:
            for group in groups:
                tree.remove(group)
        except OSError as error:
            if time.monotonic() > give_up:
                raise SandboxError(f"the control group {path} cannot be removed: {error}") from error
            _kill(groups)
            time.sleep(0.005)


def _kill(groups: list[Path]) -> None:
    for group in groups:
        with contextlib.suppress(FileNotFoundError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
