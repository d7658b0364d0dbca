"""The one owner of every file name of a run.

Shared between the nodes: the run directory, ``runs/<date>/<name>-<id>/``. Local to a node: the
runtime directory, ``<runtime_root>/prorl-<uid>-<hash of run id and node>``, for sockets and scratch.
Both are 0700; both are named after the run, so clean-up never guesses.
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


def node_name() -> str:
    """This node's name: Slurm's where there is one (several may share a host), else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class RunDirectory:
    """Paths of one run. Constructing it touches nothing; ``create`` and ``open`` do."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def create(cls, config: ProrlConfig) -> RunDirectory:
        """A new directory with a unique id, holding the composed config."""
        day = Path(config.run.root).absolute() / time.strftime("%Y-%m-%d")
        day.mkdir(parents=True, exist_ok=True)
        while True:
            run = cls(day / f"{config.run.name}-{secrets.token_hex(3)}")
            try:
                run.path.mkdir(mode=0o700)
                break
            except FileExistsError:
                continue
        for directory in (run.state, run.logs, run.rollouts, run.checkpoints, run.weights, run.keys, run.jobs):
            directory.mkdir(mode=0o700)
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
        """ProcessState of each process, and the markers below."""
        return self.path / "state"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

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
    def keepsakes_file(self) -> Path:
        """What a coordinator that is started again in the same job must know beside its journal."""
        return self.state / "keepsakes.json"

    @property
    def trainer_status_file(self) -> Path:
        return self.state / "trainer-status.json"

    @property
    def stop_marker(self) -> Path:
        """Exists when the run is to stop (its text says why); every node's supervisor looks at it."""
        return self.state / "STOP"

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
    def runtime_dir(self, runtime_root: str, node: str | None = None) -> Path:
        """Path of this node's runtime directory; not created here."""
        digest = hashlib.sha256(f"{self.run_id}\0{self.path}\0{node or node_name()}".encode()).hexdigest()[:10]
        return Path(runtime_root) / f"prorl-{os.getuid()}-{digest}"

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
