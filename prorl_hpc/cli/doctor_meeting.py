"""Nodes of a trial allocation meet: do they see each other's files and locks, reach each other, agree on the time?

They meet in a directory of the run's storage. Each node listens on a free port, writes where into ``<name>.hello``, tries
every other one by host name and by the address that a run would publish, and stays until all have written ``<name>.done``.
One line is asked on each connection: ``TOKEN time``, ``TOKEN make FILE`` or ``TOKEN lock``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from prorl_hpc.cli.findings import Finding, judged
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import TransportError
from prorl_hpc.transport.addresses import node_address

HELLO_LIMIT_S = 60.0
DONE_LIMIT_S = 60.0
_CONNECT_S = 4.0
_VISIBLE_LIMIT_S, _SLOW_VISIBLE_S = 30.0, 3.0
_SKEW_WARN_S, _SKEW_FAIL_S = 1.0, 60.0
RACES = 16
"""Files that all nodes try to create at the same time."""


class Hello(msgspec.Struct, frozen=True):
    """Where a node is to be reached."""

    name: str
    host: str
    address: str
    port: int


class Meeting:
    """One node's part. ``names``: all nodes of the trial."""

    def __init__(self, directory: Path, name: str, names: list[str], interface: str) -> None:
        self._directory, self._name, self._names, self._interface = directory, name, names, interface
        self._token = (directory / "token").read_text().strip()
        self._server = socket.create_server(("", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def findings(self) -> Iterator[Finding]:
        try:
            address = node_address(self._interface)
        except TransportError as error:
            yield Finding("fail", "interface", str(error), "set cluster.interface to one that every node has")
            address = node_address()
        else:
            yield judged(
                "interface",
                f"{self._interface or 'that of the host name'}: {address}",
                "set cluster.interface: the host name leads to this machine alone, so other nodes cannot reach it",
                good=not address.startswith("127."),
                grade="fail" if len(self._names) > 1 else "ok",
            )
        hello = Hello(self._name, socket.gethostname(), address, self._server.getsockname()[1])
        write_json(self._directory / f"{self._name}.hello", hello)
        for name in self._names:
            if name != self._name:
                yield from self._with(name)

    def races_won(self) -> int:
        """How many of the files this node created that all try to create at once."""
        won = 0
        for i in range(RACES):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._directory / f"race-{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                won += 1
        return won

    def leave(self) -> None:
        """Stay for the others, then stop listening."""
        (self._directory / f"{self._name}.done").touch()
        _until(lambda: all((self._directory / f"{n}.done").exists() for n in self._names), DONE_LIMIT_S)
        self._server.close()

    def _with(self, name: str) -> Iterator[Finding]:
        path = self._directory / f"{name}.hello"
        if _until(path.exists, HELLO_LIMIT_S) is None:
            cure = (
                f"see what {name}'s node says; if it is there, {self._directory} is not the same storage on both nodes"
            )
            yield Finding("fail", f"meeting {name}", f"nothing of it in {HELLO_LIMIT_S:.0f} s", cure)
            return
        peer = read_json(path, Hello)
        assert peer is not None
        yield from self._reach(peer)

    def _reach(self, peer: Hello) -> Iterator[Finding]:
        subject = f"reach {peer.name}"
        failed, good = [], ""
        for how in dict.fromkeys((peer.host, peer.address)):
            try:
                with self._ask(how, peer.port, "time") as (_, answer):
                    float(answer)
                good = how
            except (OSError, ValueError) as error:
                failed.append(f"{how}:{peer.port} ({error})")
        if failed:
            cure = (
                "open TCP between the nodes (firewall, routes), and choose an interface that connects them with "
                "cluster.interface"
            )
            # a run publishes the address; the name alone is a matter of /etc/hosts
            grade = "fail" if not good or good == peer.host else "warn"
            yield Finding(grade, subject, f"{peer.host} cannot be reached at {' nor at '.join(failed)}", cure)
        if not good:
            return
        if not failed:
            yield Finding("ok", subject, f"{peer.host} by name and at {peer.address}, on a free port")
        yield self._clock(peer, good)
        yield self._visible(peer, good)
        if peer.name == self._names[0]:
            yield self._lock(peer, good)

    def _clock(self, peer: Hello, how: str) -> Finding:
        before = time.time()
        with self._ask(how, peer.port, "time") as (_, answer):
            after = time.time()
        skew = float(answer) - (before + after) / 2
        grade = "fail" if abs(skew) > _SKEW_FAIL_S else "warn"
        cure = "ask the admins to keep the nodes' clocks (chrony): deadlines and MUNGE go by them"
        found = f"{peer.host} is {abs(skew):.3f} s {'ahead' if skew > 0 else 'behind'}"
        return judged("clock", found, cure, good=abs(skew) < _SKEW_WARN_S, grade=grade)

    def _visible(self, peer: Hello, how: str) -> Finding:
        name = f"made-for-{self._name}-by-{peer.name}"
        path = self._directory / name
        path.exists()  # a client that caches what is not there would now do so
        with self._ask(how, peer.port, f"make {name}"):
            seen_s = _until(path.exists, _VISIBLE_LIMIT_S)
        if seen_s is None:
            found = f"a file that {peer.host} made is not seen here after {_VISIBLE_LIMIT_S:.0f} s"
            cure = "set run.root to storage that all nodes share"
            return Finding("fail", "shared files", found, cure)
        cure = "marks of a run are seen that late: ask the admins for shorter attribute caching (actimeo), or other storage"
        found = f"a file that {peer.host} made is seen here after {seen_s:.2f} s"
        return judged("shared files", found, cure, good=seen_s < _SLOW_VISIBLE_S)

    def _lock(self, peer: Hello, how: str) -> Finding:
        with self._ask(how, peer.port, "lock"), (self._directory / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Finding("ok", "shared locks", f"a lock that {peer.host} holds is held here")
            except OSError as error:
                return Finding(
                    "fail", "shared locks", f"flock: {error.strerror}", "set run.root to storage that has locks"
                )
        cure = "set run.root to storage whose locks hold between nodes (not mounted with local locks)"
        return Finding("fail", "shared locks", f"a lock that {peer.host} holds is not held here", cure)

    @contextlib.contextmanager
    def _ask(self, how: str, port: int, question: str) -> Iterator[tuple[socket.socket, str]]:
        with socket.create_connection((how, port), timeout=_CONNECT_S) as line:
            line.sendall(f"{self._token} {question}\n".encode())
            with line.makefile() as answers:
                yield line, answers.readline().strip()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, line.makefile("rw") as wire, contextlib.suppress(OSError):
            line.settimeout(_VISIBLE_LIMIT_S)
            token, _, question = wire.readline().strip().partition(" ")
            if token != self._token:
                return
            verb, _, name = question.partition(" ")
            with (self._directory / "lock").open("a") as file:
                if verb == "lock":
                    fcntl.flock(file, fcntl.LOCK_EX)
                elif verb == "make":
                    (self._directory / Path(name).name).touch()
                wire.write(f"{time.time()}\n")
                wire.flush()
                wire.readline()  # until the other one hangs up


def _until(holds: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until ``holds``; None if that took too long."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > limit_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - began
