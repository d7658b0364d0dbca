"""A real Slurm cluster of one's own on this machine, up in about a second; nothing in /etc, no systemd.

    python tests/cluster/private_slurm.py start DIR [--kind mini|namespaced] [--share PATH …] [--until-eof]
    python tests/cluster/private_slurm.py run DIR -- sinfo          # a command on the login node
    python tests/cluster/private_slurm.py stop DIR

``mini``: several slurmd on this host; needs no root; hides wrong use of /tmp and 127.0.0.1 across nodes.
``namespaced``: every node has its own network, mount, PID, IPC and UTS namespaces, private /tmp and /dev/shm,
and an address 10.77.0.x; needs root. The directories of ``--share`` are seen by all nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from slurm_config import CPU_NODES, LOGIN, NODES, node_line, write_slurm_config

PRIVATE_MOUNTS = ("/tmp", "/var/tmp", "/run", "/dev/shm")
TMPFS_SIZE = "12g"
"""Size of each private tmpfs of a namespaced node; memory is used only for what is written (weights)."""
os.environ["PATH"] += ":/usr/sbin:/sbin"


def missing(kind: str) -> str:
    """Why a cluster of ``kind`` cannot run here; empty if it can."""
    programs = ["slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue"]
    if kind == "namespaced":
        programs += ["ip", "unshare", "nsenter"]
        if os.getuid() != 0:
            return "namespaced nodes need root"
        if subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True).returncode != 0:
            return "this machine does not allow new network and mount namespaces"
    absent = [p for p in programs if shutil.which(p) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class PrivateSlurm(ABC):
    """One cluster in ``directory``. Constructing it touches nothing."""

    kind = "mini"

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    @property
    def shared(self) -> Path:
        """A directory that all nodes see."""
        path = self.directory / "shared"
        path.mkdir(exist_ok=True)
        return path

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    def command(self, argv: list[str], node: str = LOGIN) -> list[str]:
        """``argv`` as a command line that runs on the login node."""
        return ["env", f"SLURM_CONF={self.conf}", *argv]

    def run(self, argv: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(argv), capture_output=True, text=True, timeout=timeout_s)

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Until every node is idle."""
        deadline = time.monotonic() + timeout_s
        answer = ""
        while time.monotonic() < deadline:
            done = self.run(["sinfo", "-h", "-N", "-o", "%N %T"])
            answer = done.stdout + done.stderr
            states = {line.strip() for line in done.stdout.splitlines()}
            if states == {f"{node} idle" for node in NODES}:
                return
            time.sleep(0.05)
        raise TimeoutError(f"the private Slurm cluster in {self.directory} did not come up; sinfo says:\n{answer}")

    def cancel_jobs(self, timeout_s: float = 20.0) -> None:
        """End all jobs, so that no step outlives the daemons."""
        self.run(["scancel", "-u", str(os.getuid())])
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            listed = self.run(["squeue", "-h"])
            if listed.returncode != 0 or not listed.stdout.strip():
                return
            time.sleep(0.1)


class MiniSlurm(PrivateSlurm):
    """Several slurmd on this host, told apart by name and port."""

    def start(self) -> None:
        d, base = self.directory, _free_port_range(len(NODES) + 1)
        host = socket.gethostname().split(".")[0]
        local = {
            "SlurmctldPort": str(base),
            "AuthInfo": f"socket={d}/munge/munge.sock,cred_expire=5",
            "SlurmdSpoolDir": f"{d}/spool/%n",
            "SlurmctldPidFile": f"{d}/run/slurmctld.pid",
            "SlurmdPidFile": f"{d}/run/%n.pid",
        }
        nodes = [node_line(n, "127.0.0.1", host, base + 1 + i) for i, n in enumerate(NODES)]
        write_slurm_config(d, f"{host}(127.0.0.1)", local, nodes)
        munge = [
            f"--{k}-file={d}/munge/{v}" for k, v in (("key", "munge.key"), ("pid", "munged.pid"), ("seed", "seed"))
        ]
        # --force: its socket may lie in a private directory, where nobody else needs it
        self._daemon(["munged", "--force", *munge, f"--log-file={d}/log/munged.log", f"--socket={d}/munge/munge.sock"])
        self._daemon(["slurmctld", "-i"])
        starting = []
        for node in NODES:
            (d / "spool" / node).mkdir(parents=True, exist_ok=True)
            starting.append(subprocess.Popen(self.command(["slurmd", "-N", node]), stdin=subprocess.DEVNULL))
        failed = [n for n, p in zip(NODES, starting, strict=True) if p.wait() != 0]
        if failed:
            raise RuntimeError(f"slurmd did not start for {', '.join(failed)}: see {d}/log")
        self.wait_idle()

    def _daemon(self, argv: list[str]) -> None:
        subprocess.run(self.command(argv), check=True, stdin=subprocess.DEVNULL)

    def stop(self) -> None:
        self.cancel_jobs()
        files = [*(self.directory / "run").glob("*.pid"), self.directory / "munge" / "munged.pid"]
        pids = [int(f.read_text()) for f in files if f.is_file() and f.read_text().strip()]
        _end(pids, signal.SIGTERM)


class NamespacedSlurm(PrivateSlurm):
    """Each node a set of namespaces; their network is a bridge in the login node's."""

    kind = "namespaced"

    def __init__(self, directory: Path, shared: list[Path] | None = None) -> None:
        super().__init__(directory)
        self._shares = shared or []

    def _init_pid(self, node: str) -> int:
        return int((self.directory / "run" / f"{node}.init").read_text())

    @staticmethod
    def address(node: str) -> str:
        if node == LOGIN:
            return "10.77.0.1"
        first = 10 if node in CPU_NODES else 20
        return f"10.77.0.{first + int(node[-2:])}"

    def command(self, argv: list[str], node: str = LOGIN) -> list[str]:
        enter = ["nsenter", "-t", str(self._init_pid(node)), "-m", "-u", "-i", "-n", "-p"]
        # nsenter loses the working directory when it changes the mount namespace
        return [*enter, f"--wd={Path.cwd()}", "--", "env", f"SLURM_CONF={self.conf}", *argv]

    def start(self) -> None:
        d = self.directory
        local = {
            "AuthInfo": "socket=/run/munge/munge.sock,cred_expire=5",
            "SlurmdSpoolDir": "/run/slurmd/%n",
            "SlurmctldPidFile": "/run/slurmctld.pid",
            "SlurmdPidFile": "/run/slurmd.pid",
        }
        nodes = [node_line(n, self.address(n)) for n in NODES]
        write_slurm_config(d, f"{LOGIN}({self.address(LOGIN)})", local, nodes)
        hosts = ["127.0.0.1 localhost"] + [f"{self.address(n)} {n}" for n in (LOGIN, *NODES)]
        (d / "etc" / "hosts").write_text("\n".join(hosts) + "\n")
        for node in (LOGIN, *NODES):
            self.boot(node)
        self.wait_idle()

    def boot(self, node: str) -> None:
        """Switch one node on."""
        pid_file = self.directory / "run" / f"{node}.init"
        pid_file.unlink(missing_ok=True)
        shared = [str(p) for p in self._shares if any(p.is_relative_to(m) for m in PRIVATE_MOUNTS)]
        script = Path(__file__).with_name("node_init.sh")
        spaces = ["unshare", "-n", "-u", "-m", "-i", "-p", "-f", "--kill-child"]
        with (self.directory / "log" / f"boot-{node}.log").open("ab") as log:
            subprocess.Popen(
                [*spaces, "bash", str(script), str(self.directory), node, self.address(node), TMPFS_SIZE, *shared],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 10
        while not pid_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {node} did not boot: see {log.name}")
            time.sleep(0.01)
        if node != LOGIN:
            self._ip("link", "add", f"v-{node}", "type", "veth", "peer", "eth0", "netns", str(self._init_pid(node)))
            self._ip("link", "set", f"v-{node}", "master", "br0", "up")

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._init_pid(LOGIN)), "-n", "--", "ip", *words], check=True)

    def crash(self, node: str) -> None:
        """Power off: every process of the node dies at once."""
        os.kill(self._init_pid(node), signal.SIGKILL)

    def cut(self, node: str) -> None:
        """Pull the node's network cable; ``heal`` puts it back."""
        self._ip("link", "set", f"v-{node}", "down")

    def heal(self, node: str) -> None:
        self._ip("link", "set", f"v-{node}", "up")

    def stop(self) -> None:
        # The death of PID 1 ends a PID namespace with all that is in it; the network goes with the last process.
        files = list((self.directory / "run").glob("*.init"))
        _end([int(f.read_text()) for f in files], signal.SIGKILL)
        for file in files:
            file.unlink(missing_ok=True)


def make_cluster(kind: str, directory: Path, shared: list[Path] | None = None) -> PrivateSlurm:
    return MiniSlurm(directory) if kind == "mini" else NamespacedSlurm(directory, shared)


def open_cluster(directory: Path) -> PrivateSlurm:
    """The cluster that was started in ``directory``."""
    return make_cluster((directory / "kind").read_text().strip(), directory)


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


def _end(pids: list[int], number: int, timeout_s: float = 10.0) -> None:
    """Signal ``pids`` and wait until they are gone (a zombie counts as gone), then SIGKILL what is left."""

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    for sent in (number, signal.SIGKILL):
        for pid in filter(alive, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        deadline = time.monotonic() + timeout_s
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)


def _start(args: argparse.Namespace) -> int:
    if reason := missing(args.kind):
        print(f"cannot start a {args.kind} cluster: {reason}", file=sys.stderr)
        return 1
    cluster = make_cluster(args.kind, args.dir, [p.absolute() for p in args.share])
    args.dir.mkdir(parents=True, exist_ok=True)
    (args.dir / "kind").write_text(args.kind)
    begun = time.monotonic()
    try:
        cluster.start()
        print(f"up in {time.monotonic() - begun:.2f} s\nexport SLURM_CONF={cluster.conf}", flush=True)
        if args.until_eof:  # the leash of a test session: however it ends, this pipe closes
            sys.stdin.read()
    except BaseException:
        cluster.stop()
        raise
    if args.until_eof:
        cluster.stop()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("start")
    start.add_argument("dir", type=Path)
    start.add_argument("--kind", choices=("mini", "namespaced"), default="mini")
    start.add_argument("--share", type=Path, action="append", default=[])
    start.add_argument("--until-eof", action="store_true", help="stop the cluster when standard input ends")
    verbs.add_parser("stop").add_argument("dir", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("dir", type=Path)
    run.add_argument("argv", nargs="+")
    args = parser.parse_args()
    if args.verb == "start":
        return _start(args)
    cluster = open_cluster(args.dir)
    if args.verb == "stop":
        cluster.stop()
        return 0
    return subprocess.run(cluster.command(args.argv)).returncode


if __name__ == "__main__":
    sys.exit(main())
