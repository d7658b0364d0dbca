"""Several slurmd on this host, told apart by name and port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess

from prorl_hpc.slurm.private.base import PrivateSlurm
from prorl_hpc.slurm.private.config import node_line, write_slurm_config
from prorl_hpc.slurm.private.ending import end, processes_of


class MiniSlurm(PrivateSlurm):
    """Needs no root. All nodes share the network, /tmp and the processes of this host."""

    def start(self) -> None:
        d, nodes = self.directory, self.shape.nodes
        base = _free_port_range(len(nodes) + 1)
        host = socket.gethostname().split(".")[0]
        local = {
            "SlurmctldPort": str(base),
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "AuthInfo": f"socket={d}/munge/munge.sock,cred_expire=5",
            "SlurmdSpoolDir": f"{d}/spool/%n",
            "SlurmctldPidFile": f"{d}/run/slurmctld.pid",
            "SlurmdPidFile": f"{d}/run/%n.pid",
        }
        lines = [node_line(self.shape, n, "127.0.0.1", host, base + 1 + i) for i, n in enumerate(nodes)]
        write_slurm_config(d, self.shape, local, lines)
        munge = [
            f"--{k}-file={d}/munge/{v}" for k, v in (("key", "munge.key"), ("pid", "munged.pid"), ("seed", "seed"))
        ]
        # --force: its socket may lie in a private directory, where nobody else needs it
        self._daemon(["munged", "--force", *munge, f"--log-file={d}/log/munged.log", f"--socket={d}/munge/munge.sock"])
        self._daemon(["slurmctld", "-i"])
        starting = []
        for node in nodes:
            (d / "spool" / node).mkdir(parents=True, exist_ok=True)
            starting.append(subprocess.Popen(self.command(["slurmd", "-N", node]), stdin=subprocess.DEVNULL))
        failed = [n for n, p in zip(nodes, starting, strict=True) if p.wait() != 0]
        if failed:
            raise RuntimeError(f"slurmd did not start for {', '.join(failed)}: see {d}/log")
        self.wait_idle()

    def _daemon(self, argv: list[str]) -> None:
        subprocess.run(self.command(argv), check=True, stdin=subprocess.DEVNULL)

    def kill_slurmd(self, node: str) -> None:
        self.shape.check_node(node)
        end([int((self.directory / "run" / f"{node}.pid").read_text())], signal.SIGKILL)

    def start_slurmd(self, node: str) -> None:
        self.shape.check_node(node)
        self._daemon(["slurmd", "-N", node])
        self.wait_in_service(node)

    def stop(self) -> None:
        files = [*(self.directory / "run").glob("*.pid"), self.directory / "munge" / "munged.pid"]
        named = [int(text) for f in files if f.is_file() and (text := f.read_text().strip())]
        # In order first; then what that left: steps that hang, daemons that have no pid file yet.
        if ours := processes_of(self.conf):
            self.cancel_jobs()
            end([pid for pid in named if pid in ours], signal.SIGTERM)
            end(processes_of(self.conf), signal.SIGKILL)


def _free_port_range(count: int) -> int:
    """The first of ``count`` successive TCP ports that are free now, away from the ephemeral range."""
    for base in range(17000 + os.getpid() % 97 * 100, 32000, count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + count):
                    held.enter_context(socket.socket()).bind(("", port))
                return base
            except OSError:
                continue
    raise RuntimeError(f"no {count} successive free ports between 17000 and 32000")
