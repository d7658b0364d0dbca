"""The directories of a run: made, opened, begun anew. Every file name of a run is in here or in run_paths.

Shared between the nodes: the run directory, ``runs/<date>/<name>-<id>/``. Local to a node: the
runtime directory, ``<runtime_root>/prorl-<uid>-<hash of run, node and rank>``, for sockets and scratch.
Both are 0700; both are named after the run, so clean-up never guesses.

A run is one or more *attempts*: each submission and each requeue of its job begins the next one. An attempt has its
own ``state/`` and ``logs/`` under ``attempts/<number>/``; all else belongs to the run. ``attempts/latest`` links to the
newest. The processes of a run know their attempt by PRORL_ATTEMPT; everybody else sees the newest.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import stat
import time
from pathlib import Path

from prorl_hpc.config.run_lock import RunDirectoryError, RunLock
from prorl_hpc.config.run_paths import RunPaths
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import load, save

__all__ = ["RunDirectory", "RunDirectoryError"]

SOCKET_PATH_LIMIT = 100
"""Bytes; the kernel's limit is 107, and ZeroMQ and vLLM append a little."""


def filled_in(path: str) -> Path:
    """``path`` with the node's environment variables. Raises RunDirectoryError naming one that is not set."""
    filled = os.path.expandvars(path)
    if "$" in filled:
        raise RunDirectoryError(f"{path}: a variable in it is not set on {node_name()}")
    return Path(filled)


def node_name() -> str:
    """This node's name: Slurm's where there is one (several may share a host), else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


RUN_ID, ATTEMPT, RANK = "PRORL_RUN_ID", "PRORL_ATTEMPT", "PRORL_NODE_RANK"
"""Environment variables of a run's processes: of which run and attempt, on which node of the plan."""
OWNER_FILE = "owner"
"""In a runtime directory: ``key=value`` lines that say whose it is (run, path, job, pid), for clean-up."""


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RunDirectory(RunPaths):
    """Paths of one run. Constructing it touches nothing; ``create`` and ``open`` do. ``attempt``: whose ``state`` and
    ``logs`` these are; None: this process's own, or the newest at each look."""

    def __init__(self, path: Path | str, attempt: int | None = None) -> None:
        self.path = Path(path).absolute()
        if attempt is None and os.environ.get(RUN_ID) == self.run_id and ATTEMPT in os.environ:
            attempt = int(os.environ[ATTEMPT])
        self._attempt = attempt

    @classmethod
    def create(cls, config: ProrlConfig) -> RunDirectory:
        """A new directory with a unique id, holding the composed config."""
        day = Path(config.run.root).absolute() / time.strftime("%Y-%m-%d")
        while True:
            _make_directories(day)
            run = cls(day / f"{config.run.name}-{secrets.token_hex(3)}")
            try:
                run.path.mkdir(mode=0o700)
                break
            except FileExistsError:
                continue
            except FileNotFoundError:  # a launch that was refused took the empty day away
                continue
        for directory in (run.attempts, run.rollouts, run.checkpoints, run.weights, run.keys, run.jobs):
            directory.mkdir(mode=0o700)
        run.lock_file.touch(mode=0o600)
        run.begin_attempt(1)
        save(config, run.config_file)
        return run

    @classmethod
    def open(cls, path: Path | str, *, to_read: bool = False) -> RunDirectory:
        """A run that is there. Raises RunDirectoryError if it is none or, unless it is only ``to_read``, if others could
        have put into it what would be done in this user's name."""
        run = cls(path)
        if not run.config_file.is_file():
            raise RunDirectoryError(
                f"{run.path} is not a run directory: it has no config.yaml. `runs/latest` links to the newest run"
            )
        if not to_read:
            run.check_ours()
        return run

    def check_ours(self) -> None:
        """Raises RunDirectoryError if this is another user's run, or others may write in it."""
        info = self.path.stat()
        if info.st_uid != os.geteuid():
            raise RunDirectoryError(
                f"{self.path} belongs to uid {info.st_uid}, and you are uid {os.geteuid()}: its settings and its job are "
                "not yours to act on. Name a run of your own, or launch one with its config.yaml"
            )
        if info.st_mode & _OTHERS_WRITE:
            raise RunDirectoryError(
                f"others may write in {self.path} (mode {stat.S_IMODE(info.st_mode):o}), so that what it says need not be "
                f"yours. If you trust it: chmod go-w {self.path}"
            )

    def lock(self, verb: str) -> RunLock:
        """For whoever submits or deletes this run: a context in which nobody else does. ``verb``: for whom it keeps out.
        Raises RunLocked, a RunDirectoryError, at once if another process has it."""
        return RunLock(self.lock_file, self.run_id, verb)

    def load_config(self) -> ProrlConfig:
        """Raises RunDirectoryError if it cannot be read, as after a slip in an editor."""
        try:
            return load(self.config_file)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"the settings of {self.run_id} cannot be read: {error}. Mend {self.config_file}, or take back the ones of "
                f"an attempt: {self.attempts}/<number>/config.yaml"
            ) from error

    # attempts
    @property
    def attempt(self) -> int:
        """The attempt that ``state`` and ``logs`` are of."""
        return self._attempt if self._attempt is not None else self.newest_attempt

    @property
    def newest_attempt(self) -> int:
        """The highest number of an attempt, whatever became of the link ``latest``; 1 before there is any."""
        return max([*self._numbers(), self._linked_attempt(), 1])

    def _linked_attempt(self) -> int:
        """0 where ``latest`` is missing or damaged: a copy of a run may have lost its links."""
        try:
            return _number((self.attempts / "latest").readlink().name)
        except OSError:
            return 0

    def _numbers(self) -> list[int]:
        try:
            with os.scandir(self.attempts) as entries:
                return sorted(number for entry in entries if (number := _number(entry.name)) and entry.is_dir())
        except FileNotFoundError:
            return []

    def begin_attempt(self, number: int, *, new: bool = False) -> RunDirectory:
        """Make the directories of attempt ``number``, if they are not there, and link ``latest`` to it unless there is a
        newer one. Any number of nodes may do so at once. Returns this run with that attempt. ``new``: raises
        RunDirectoryError if anybody else has begun it."""
        begun = RunDirectory(self.path, number)
        try:
            begun.attempt_dir.mkdir(mode=0o700, exist_ok=not new)
        except FileExistsError:
            raise RunDirectoryError(
                f"attempt {number} of {self.run_id} has just been begun by somebody else: look with `prorl-hpc status "
                f"{self.path}`"
            ) from None
        for directory in (begun.state, begun.logs):
            directory.mkdir(mode=0o700, exist_ok=True)
        if self._linked_attempt() < number:
            self._link_latest(number)
        if self.config_file.is_file() and not begun.attempt_config_file.exists():
            aside = begun.attempt_dir / f".config-{secrets.token_hex(4)}"
            aside.write_bytes(self.config_file.read_bytes())
            aside.replace(begun.attempt_config_file)
        return begun

    def withdraw_attempt(self, number: int) -> None:
        """Take back an attempt that this process has begun and that came to nothing."""
        shutil.rmtree(RunDirectory(self.path, number).attempt_dir)
        self._link_latest(max([*self._numbers(), 1]))

    def _link_latest(self, number: int) -> None:
        aside, latest = self.attempts / f".latest-{secrets.token_hex(4)}", self.attempts / "latest"
        aside.symlink_to(str(number))
        try:
            aside.replace(latest)
        except IsADirectoryError:  # a copy that followed the link: the numbers tell which is the newest
            aside.unlink()

    def all_attempts(self) -> list[RunDirectory]:
        """This run with each of its attempts, oldest first."""
        return [RunDirectory(self.path, number) for number in self._numbers()]

    # node-local files
    def runtime_dir(self, runtime_root: str, node: str | None = None, rank: int | None = None) -> Path:
        """Path of a node's runtime directory (default: of this process's own node); not created here. ``rank``: the
        node's place in the plan, for two nodes of the plan may be one host. Raises RunDirectoryError if a variable in
        ``runtime_root`` is not set here."""
        if rank is None:
            rank = int(os.environ.get(RANK, "0")) if os.environ.get(RUN_ID) == self.run_id else 0
        key = f"{self.run_id}\0{self.path}\0{node or node_name()}\0{rank}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:10]
        return filled_in(runtime_root) / f"prorl-{os.getuid()}-{digest}"

    @staticmethod
    def check_socket_length(path: Path) -> None:
        """Raise RunDirectoryError if sockets in the runtime directory ``path`` would get too long a name."""
        longest = path / ("x" * 32)
        if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
            raise RunDirectoryError(
                f"socket paths under {path} would be {len(os.fsencode(longest))} bytes long, the limit is "
                f"{SOCKET_PATH_LIMIT}: set run.runtime_root to a shorter node-local directory"
            )

    def make_runtime_dir(self, runtime_root: str) -> Path:
        """Create it, 0700 and ours; refuse one that belongs to someone else."""
        path = self.runtime_dir(runtime_root)
        self.check_socket_length(path)
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise RunDirectoryError(
                f"{path} exists and is not a private directory of uid {os.getuid()}: remove it or set run.runtime_root"
            )
        return path


def _number(name: str) -> int:
    """Of an attempt's directory; 0 if it is none."""
    return int(name) if name.isascii() and name.isdecimal() else 0


def _make_directories(path: Path) -> None:
    """With those above it; others may not write in what is made, whatever the umask."""
    for directory in reversed([path, *path.parents]):
        if not directory.exists():
            directory.mkdir(mode=0o755, exist_ok=True)
