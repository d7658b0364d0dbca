"""Ray as a peer: in an environment of its own under the user's cache, run as a subprocess, shut down each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from prorl_hpc.bench.peer_environment import peer_environment
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.messages.errors import RunError

RAY_VERSION = "2.60.0"
TASKS = "chained tasks"
FORMS = (TASKS, "one actor per chain", "a pipeline of actors")
_SCRIPT = Path(__file__).parent / "peers" / "ray_chain.py"


class RayFound(msgspec.Struct, frozen=True):
    """``forms``: chains of three per second by ``<form>, <n> in flight``."""

    ray: str
    chains: int
    forms: dict[str, float]


class RayPeer:
    """``python`` is that of its environment."""

    def __init__(self, python: Path) -> None:
        self._python = python

    @classmethod
    def installed(cls, say: Callable[[str], None]) -> RayPeer:
        """Made with pip when it is missing. RunError says why it cannot be."""
        return cls(peer_environment("ray", RAY_VERSION, say) / "bin" / "python")

    def measure(self, chains: int, forms: Sequence[str], windows: Sequence[int], timeout_s: float = 300.0) -> RayFound:
        """Start Ray, warm it up, run each form with each number of chains in flight, shut it down."""
        with scratch_directory() as directory, Processes(directory) as processes:
            command = [str(self._python), str(_SCRIPT), "--chains", str(chains), "--temp-dir", str(directory / "ray")]
            command += ["--windows", *map(str, windows), "--forms", *forms, "--out", str(directory / "found.json")]
            # Ray's telemetry would ask the network; PYTHONPATH could bring this environment's packages in.
            processes.start("ray", command, {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""})
            if (code := processes.wait("ray", timeout_s)) != 0:
                raise RunError(f"Ray ended with exit code {code}:\n{processes.tail('ray')}")
            return msgspec.json.decode((directory / "found.json").read_bytes(), type=RayFound)
