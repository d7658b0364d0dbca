"""The one owner of every file name of a run.

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
import socket
import stat
import time
from pathlib import Path

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import load, save

SOCKET_PATH_LIMIT = 100
"""Bytes; the kernel's limit is 107, and ZeroMQ and vLLM append a little."""


class RunDirectoryError(ValueError):
    """A directory is missing, someone else's, or makes socket paths too long."""


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


class RunDirectory:
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
            day.mkdir(parents=True, exist_ok=True)
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
        run.begin_attempt(1)
        save(config, run.config_file)
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        run = cls(path)
        if not run.config_file.is_file():
            raise RunDirectoryError(
                f"{run.path} is not a run directory: it has no config.yaml. `runs/latest` links to the newest run"
            )
        return run

    def load_config(self) -> ProrlConfig:
        return load(self.config_file)

    # attempts
    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def attempt(self) -> int:
        """The attempt that ``state`` and ``logs`` are of."""
        return self._attempt if self._attempt is not None else self.newest_attempt

    @property
    def newest_attempt(self) -> int:
        """The number that ``attempts/latest`` links to; 1 before there is any."""
        try:
            return int((self.attempts / "latest").readlink().name)
        except FileNotFoundError:
            return 1

    def begin_attempt(self, number: int) -> RunDirectory:
        """Make the directories of attempt ``number``, if they are not there, and link ``latest`` to it unless there is a
        newer one. Any number of nodes may do so at once. Returns this run with that attempt."""
        begun = RunDirectory(self.path, number)
        for directory in (begun.attempt_dir, begun.state, begun.logs):
            directory.mkdir(mode=0o700, exist_ok=True)
        if not (self.attempts / "latest").is_symlink() or self.newest_attempt < number:
            aside = self.attempts / f".latest-{secrets.token_hex(4)}"
            aside.symlink_to(str(number))
            aside.replace(self.attempts / "latest")
        if self.config_file.is_file() and not begun.attempt_config_file.exists():
            aside = begun.attempt_dir / f".config-{secrets.token_hex(4)}"
            aside.write_bytes(self.config_file.read_bytes())
            aside.replace(begun.attempt_config_file)
        return begun

    def all_attempts(self) -> list[RunDirectory]:
        """This run with each of its attempts, oldest first."""
        numbers = sorted(int(path.name) for path in self.attempts.iterdir() if path.name.isdigit())
        return [RunDirectory(self.path, number) for number in numbers]

    @property
    def attempt_dir(self) -> Path:
        return self.attempts / str(self.attempt)

    @property
    def attempt_config_file(self) -> Path:
        """The run's settings as they were when the attempt began: ``resume`` can change them."""
        return self.attempt_dir / "config.yaml"

    @property
    def ending_file(self) -> Path:
        """How the attempt ended, written by its launcher."""
        return self.attempt_dir / "ending.json"

    @property
    def placement_file(self) -> Path:
        """Which node of the plan is which host, in this attempt."""
        return self.attempt_dir / "placement.json"

    @property
    def run_id(self) -> str:
        return self.path.name

    # shared files
    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def state(self) -> Path:
        """ProcessState of each process, and the markers below; the attempt's own."""
        return self.attempt_dir / "state"

    @property
    def logs(self) -> Path:
        """The attempt's own."""
        return self.attempt_dir / "logs"

    @property
    def jobs(self) -> Path:
        """submitit's own files."""
        return self.path / "jobs"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Where the trainer leaves weights for inference nodes that do not share its node."""
        return self.path / "weights"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report_file(self) -> Path:
        return self.path / "report.md"

    @property
    def reward_plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def status_file(self) -> Path:
        return self.state / "status.json"

    @property
    def journal_file(self) -> Path:
        """The coordinator's SQLite database."""
        return self.path / "journal.sqlite"

    @property
    def epoch_file(self) -> Path:
        """The token of the run's epoch: which recorded rollouts count (rollout.epoch)."""
        return self.path / "epoch"

    @property
    def keepsakes_file(self) -> Path:
        """What a coordinator that is started again must know beside its journal."""
        return self.path / "keepsakes.json"

    @property
    def trainer_status_file(self) -> Path:
        return self.state / "trainer-status.json"

    @property
    def stop_marker(self) -> Path:
        """Exists when the attempt is to stop: slurm.endings.StopOrder; every node's supervisor looks at it."""
        return self.state / "STOP"

    @property
    def drained_marker(self) -> Path:
        """Written by the coordinator that was told to drain, when no rollout is under way any more."""
        return self.state / "DRAINED"

    @property
    def finished_marker(self) -> Path:
        """Written by the trainer when training is complete."""
        return self.state / "FINISHED"

    @property
    def failure_file(self) -> Path:
        """Written by the supervisor that sees the first process die: its name and last lines."""
        return self.state / "FAILED.json"

    def restarts_file(self, rank: int) -> Path:
        """Restarts of processes on the node of that rank, written by its supervisor."""
        return self.state / f"node-{rank}.restarts"

    def restart_files(self) -> list[Path]:
        return sorted(self.state.glob("node-*.restarts"))

    @property
    def api_token_file(self) -> Path:
        return self.keys / "api-token"

    def process_state(self, name: str) -> Path:
        return self.state / f"{name}.json"

    def process_log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

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
