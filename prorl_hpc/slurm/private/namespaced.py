"""Each node a set of namespaces; their network is a bridge in the login node's.

All nodes live inside the *site*: a PID and mount namespace around them. Whoever kills its first process ends every node
and job, with their mounts and interfaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.private.base import PrivateSlurm, search_path
from prorl_hpc.slurm.private.config import node_line, write_slurm_config
from prorl_hpc.slurm.private.ending import end
from prorl_hpc.slurm.private.shape import LOGIN

PRIVATE_MOUNTS = ("/tmp", "/var/tmp", "/run", "/dev/shm")
TMPFS_SIZE = "12g"
"""Size of each private tmpfs of a node; memory is used only for what is written (weights)."""
_SITE = "site"
_SITE_INIT = """
read -r pid _ </proc/self/stat # the host's number: /proc is still the host's
echo "$pid" >"$1.new" && mv "$1.new" "$1"
while :; do sleep 60 & wait; done # reaps
"""


class NamespacedSlurm(PrivateSlurm):
    """Needs root. The host sees a file of a node under ``/proc/<its first process>/root``."""

    def _init_pid(self, name: str) -> int:
        """The host's number of the first process of a node or of the site. Raises ConfigError if it does not live."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pid = int((self.directory / "run" / f"{name}.init").read_text())
            if os.fsencode(self.directory) in Path(f"/proc/{pid}/cmdline").read_bytes():  # else it is another's by now
                return pid
        raise ConfigError(f"{name} is not up in the private cluster {self.directory}")

    def _site_processes(self) -> list[int]:
        """The site's first process and the one that made it."""
        words = [_SITE, str(self.directory / "run" / f"{_SITE}.init")]
        found = psutil.process_iter(["cmdline"])
        return [process.pid for process in found if (process.info["cmdline"] or [])[-2:] == words]

    def _is_up(self, name: str) -> bool:
        with contextlib.suppress(ConfigError):
            return self._init_pid(name) > 0
        return False

    def address(self, node: str) -> str:
        if node == LOGIN:
            return "10.77.0.1"
        first = 10 if node in self.shape.cpu_names else 100
        return f"10.77.0.{first + int(node[-2:])}"

    def command(self, argv: list[str], node: str = LOGIN) -> list[str]:
        enter = ["nsenter", "-t", str(self._init_pid(node)), "-m", "-u", "-i", "-n", "-p"]
        # nsenter loses the working directory when it changes the mount namespace
        return [*enter, f"--wd={Path.cwd()}", "--", *self.environment(), *argv]

    def start(self) -> None:
        d, nodes = self.directory, self.shape.nodes
        local = {
            "SlurmctldHost": f"{LOGIN}({self.address(LOGIN)})",
            "AuthInfo": "socket=/run/munge/munge.sock,cred_expire=5",
            "SlurmdSpoolDir": "/run/slurmd/%n",
            "SlurmctldPidFile": "/run/slurmctld.pid",
            "SlurmdPidFile": "/run/slurmd.pid",
        }
        write_slurm_config(d, self.shape, local, [node_line(self.shape, n, self.address(n)) for n in nodes])
        hosts = ["127.0.0.1 localhost"] + [f"{self.address(n)} {n}" for n in (LOGIN, *nodes)]
        (d / "etc" / "hosts").write_text("\n".join(hosts) + "\n")
        self._make_site()
        for node in (LOGIN, *nodes):
            self._switch_on(node)
        self.wait_idle()

    def _make_site(self) -> None:
        pid_file = self._forget_pid(_SITE)
        words = ["unshare", "-m", "-p", "-f", "--kill-child", "bash", "-c", _SITE_INIT, _SITE, str(pid_file)]
        self._spawn(_SITE, words)
        for path, size in self.shape.share_tmpfs.items():
            Path(path).mkdir(parents=True, exist_ok=True)
            mount = ["mount", "-t", "tmpfs", "-o", f"mode=1777,size={size}", "tmpfs", path]
            subprocess.run(["nsenter", "-t", str(self._init_pid(_SITE)), "-m", "--", *mount], check=True)

    def boot(self, node: str) -> None:
        """Switch a node on that crashed, until it is in service."""
        self.shape.check_node(node)
        if self._is_up(node):
            raise ConfigError(f"{node} is on already: `crash` switches it off")
        self._switch_on(node)
        self.wait_in_service(node)
        if self.states()[node] == "completing":
            self._forget_jobs(node)
            self.wait_in_service(node)

    def _forget_jobs(self, node: str) -> None:
        """Jobs that were ending when the node crashed: nobody there will report their end any more, and the controller
        asks again only after minutes."""
        for state in (["State=DOWN", "Reason=crashed"], ["State=RESUME"]):
            self.run(["scontrol", "update", f"NodeName={node}", *state]).check_returncode()

    def _switch_on(self, node: str) -> None:
        self._forget_pid(node)
        shares = [*self.shape.share, *self.shape.share_tmpfs]
        hidden = [path for path in shares if any(Path(path).is_relative_to(m) for m in PRIVATE_MOUNTS)]
        script = Path(__file__).with_name("node_init.sh")
        site = ["nsenter", "-t", str(self._init_pid(_SITE)), "-m", "-p", "--"]
        spaces = ["unshare", "-n", "-u", "-m", "-i", "-p", "-f", "--kill-child"]
        words = ["bash", str(script), str(self.directory), node, self.address(node), TMPFS_SIZE, *hidden]
        self._spawn(node, [*site, *spaces, *words])
        if node == LOGIN:
            return
        with contextlib.suppress(subprocess.CalledProcessError):  # the kernel is slow to take a dead node's end down
            self._ip("link", "delete", f"v-{node}", quiet=True)
        self._ip("link", "add", f"v-{node}", "type", "veth", "peer", "eth0", "netns", str(self._init_pid(node)))
        self._ip("link", "set", f"v-{node}", "master", "br0", "up")

    def _forget_pid(self, name: str) -> Path:
        pid_file = self.directory / "run" / f"{name}.init"
        pid_file.unlink(missing_ok=True)
        return pid_file

    def _spawn(self, name: str, words: list[str]) -> None:
        """Start the first process of ``name``, until its pid file is there."""
        with (self.directory / "log" / f"boot-{name}.log").open("ab") as log:
            started = subprocess.Popen(
                ["env", f"PATH={search_path()}", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 10
        while not (self.directory / "run" / f"{name}.init").exists():
            if time.monotonic() > deadline or started.poll() is not None:
                raise RuntimeError(f"{name} of the private cluster did not boot: see {log.name}")
            time.sleep(0.01)

    def _ip(self, *words: str, quiet: bool = False) -> None:
        enter = ["nsenter", "-t", str(self._init_pid(LOGIN)), "-n", "--", "env", f"PATH={search_path()}"]
        subprocess.run([*enter, "ip", *words], check=True, capture_output=quiet)

    def crash(self, node: str) -> None:
        """Power off: every process of the node dies at once."""
        self.shape.check_node(node)
        end([self._init_pid(node)], signal.SIGKILL)

    def cut(self, node: str) -> None:
        """Pull the node's network cable; ``heal`` puts it back."""
        self.shape.check_node(node)
        self._ip("link", "set", f"v-{node}", "down")

    def heal(self, node: str) -> None:
        """Put the cable back. Jobs that the controller still holds for running there go on."""
        self.shape.check_node(node)
        self._ip("link", "set", f"v-{node}", "up")
        if self.states()[node].startswith("down"):  # it would ask the node again only after a minute
            self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"]).check_returncode()

    def kill_slurmd(self, node: str) -> None:
        self.shape.check_node(node)
        subprocess.run(self.command(["sh", "-c", "kill -KILL $(cat /run/slurmd.pid)"], node), check=True)

    def start_slurmd(self, node: str) -> None:
        self.shape.check_node(node)
        subprocess.run(self.command(["slurmd", "-N", node], node), check=True, stdin=subprocess.DEVNULL)
        self.wait_in_service(node)

    def stop(self) -> None:
        # The death of PID 1 ends a PID namespace with all that is in it; the network goes with the last process. It is found
        # by its command line: somebody may have removed the directory meanwhile.
        end(self._site_processes(), signal.SIGKILL)
        for file in (self.directory / "run").glob("*.init"):
            file.unlink(missing_ok=True)
