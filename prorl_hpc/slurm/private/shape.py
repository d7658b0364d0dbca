"""What a private cluster consists of; kept in its directory as ``cluster.json``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ConfigError

KINDS = ("mini", "namespaced")
LOGIN = "login"
MOST_NODES = 80
"""Of each sort; what the addresses 10.77.0.x have room for."""
_FILE = "cluster.json"


class Shape(msgspec.Struct, frozen=True):
    """``cpus``, ``memory_mib`` and ``gpus`` are what each node claims to have, whatever the machine has. ``share``: host
    directories that all nodes see. ``share_tmpfs``: path → size (64m) of a file system that all nodes share, so that it
    can be filled. ``kill_wait_s`` lies between SIGTERM and SIGKILL of an ended job; Slurm's default is 30. ``settings``:
    more of slurm.conf, such as Epilog."""

    kind: str = "mini"
    cpu_nodes: int = 4
    gpu_nodes: int = 2
    cpus: int = 8
    memory_mib: int = 16000
    gpus: int = 2
    kill_wait_s: int = 10
    max_minutes: int = 120
    share: list[str] = []
    share_tmpfs: dict[str, str] = {}
    settings: dict[str, str] = {}

    @property
    def cpu_names(self) -> list[str]:
        return [f"cpu{i:02}" for i in range(1, self.cpu_nodes + 1)]

    @property
    def gpu_names(self) -> list[str]:
        return [f"gpu{i:02}" for i in range(1, self.gpu_nodes + 1)]

    @property
    def nodes(self) -> list[str]:
        return self.cpu_names + self.gpu_names

    def check(self) -> None:
        """Raise ConfigError naming the first setting that cannot be."""
        if self.kind not in KINDS:
            raise ConfigError(f"--kind {self.kind}: there are {', '.join(KINDS)}")
        limits = {
            "--cpu-nodes": (self.cpu_nodes, 1, MOST_NODES),
            "--gpu-nodes": (self.gpu_nodes, 0, MOST_NODES),
            "--cpus": (self.cpus, 1, 1024),
            "--memory-mib": (self.memory_mib, 1, 1 << 24),
            "--gpus": (self.gpus, 1, 16),
            "--kill-wait": (self.kill_wait_s, 1, 65533),
            "--max-minutes": (self.max_minutes, 1, 1 << 20),
        }
        for option, (given, least, most) in limits.items():
            if not least <= given <= most:
                raise ConfigError(f"{option} {given}: expected {least} to {most}")
        if self.share_tmpfs and self.kind != "namespaced":
            raise ConfigError(
                "--share-tmpfs needs --kind namespaced: the nodes of a mini cluster share all file systems"
            )

    def check_node(self, node: str) -> None:
        """Raise ConfigError if there is no such node."""
        if node not in self.nodes:
            raise ConfigError(f"there is no node {node}: there are {', '.join(self.nodes)}")

    def write(self, directory: Path) -> None:
        write_json(directory / _FILE, self)

    @classmethod
    def read(cls, directory: Path) -> Shape:
        """Of the cluster that was started in ``directory``. Raises ConfigError if none was."""
        found = read_json(directory / _FILE, cls)
        if found is None:
            raise ConfigError(
                f"{directory} holds no private cluster: `prorl-hpc dev cluster start {directory}` makes one"
            )
        return found
