"""Child processes of a supervisor: started in groups of their own, reaped, ended to the last grandchild."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from prorl_hpc.observe.process import START_TOKEN
from prorl_hpc.slurm.own_container import Command
from prorl_hpc.slurm.plan import ProcessPlan

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
LAST_LINES = 20
HEAD_START_S = 1.0
"""Of a tier of processes that are to stop before the next."""


def become_subreaper() -> None:
    """Orphaned grandchildren become our children, so that they can be found and ended."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Get ``number`` when the process that started this one is gone, however it went."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


@dataclass
class Child:
    """One started process of the plan. ``token``: in the environment of all that descends from it, and in the states that
    it writes, for in a container its process id is not ``process.pid``."""

    plan: ProcessPlan
    process: subprocess.Popen[bytes]
    log: Path
    started_at: float
    token: str
    ready: bool = False
    told: bool = False
    """To end, by SIGTERM."""
    ended_at: float | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def running(self) -> bool:
        return self.ended_at is None

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        code = self.process.returncode
        if code is None:
            return "is running"
        if code == -signal.SIGTERM and self.told:
            return "ended at SIGTERM, as it was told to"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    @property
    def death(self) -> str:
        """The same when nobody had told it to end."""
        return self.ending + (" before the run was finished" if self.process.returncode == 0 else "")

    def last_lines(self) -> list[str]:
        """The end of its log."""
        return tail(self.log, LAST_LINES)

    def send(self, number: int) -> None:
        """Signal it, if it runs."""
        if self.running:
            self.told = self.told or number == signal.SIGTERM
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL its whole process group; the group can outlive its leader."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill_kin(self) -> list[psutil.Process]:
        """SIGKILL its group, and all that descends from it in groups of their own; returns those that were still there.
        They are ours by now: this process is a subreaper."""
        self.kill_group()
        kin = [p for p in psutil.Process().children(recursive=True) if _start_token(p) == self.token]
        for process in kin:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return kin


def command_of(plan: ProcessPlan, run_dir: Path) -> list[str]:
    """The command line of one process of the plan, on this Python."""
    command = [sys.executable, "-m", f"prorl_hpc.{plan.module}" if "." not in plan.module else plan.module]
    command += ["--run-dir", str(run_dir), "--name", plan.name]
    return [*command, "--index", str(plan.index), "--rank", str(plan.rank), "--world", str(plan.world)]


def start_child(plan: ProcessPlan, command: Command, log_file: Path) -> Child:
    """Start one process of the plan in a group of its own; it dies with this process."""
    token = secrets.token_hex(8)
    with log_file.open("ab") as out:
        process = subprocess.Popen(
            command.words,
            env={**command.environ, START_TOKEN: token},
            stdin=subprocess.PIPE if command.leashed else subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=None if command.leashed else _bind_to(os.getpid()),
        )
    return Child(plan, process, log_file, time.monotonic(), token)


def _bind_to(supervisor: int) -> Callable[[], None]:
    def bind() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)

    return bind


def reap(children: list[Child]) -> None:
    """Collect every process that has ended, ours by plan or inherited ones."""
    by_pid = {child.process.pid: child for child in children}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        child = by_pid.get(ended.si_pid)
        if child is None:
            os.waitpid(ended.si_pid, 0)
        else:
            child.process.wait()
            child.ended_at = time.monotonic()


def stop_in_order(tiers: list[list[Child]], timeout_s: float) -> None:
    """SIGTERM tier after tier, the next one when the one before has ended or its head start is over. All of them have
    ``timeout_s`` together; then their groups are killed."""
    everyone = [child for tier in tiers for child in tier]
    deadline = time.monotonic() + timeout_s
    for tier in tiers:
        for child in tier:
            child.send(signal.SIGTERM)
        _wait_ended(tier, everyone, min(deadline, time.monotonic() + min(HEAD_START_S, timeout_s / len(tiers))))
    _wait_ended(everyone, everyone, deadline)
    for child in everyone:
        if child.running:
            log.warning("%s did not stop within %.0f s and is killed", child.name, timeout_s)
        child.kill_group()
    _wait_ended(everyone, everyone, time.monotonic() + 5.0)


def _wait_ended(some: list[Child], everyone: list[Child], deadline: float) -> None:
    while True:
        reap(everyone)
        if not any(child.running for child in some) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def end_descendants(children: list[Child], timeout_s: float = 5.0) -> list[str]:
    """Kill whatever still descends from this process; returns what could not be ended, for people."""
    me, deadline = psutil.Process(), time.monotonic() + timeout_s
    while True:
        reap(children)
        left = [p for p in me.children(recursive=True) if p.is_running()]
        if not left or time.monotonic() > deadline:
            return [f"{p.pid} ({_command_of(p)})" for p in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                log.info("ending what a process left behind: %d (%s)", process.pid, _command_of(process))
                process.kill()
        time.sleep(0.05)


def _start_token(process: psutil.Process) -> str:
    """Empty for one that has ended, or has given its environment up."""
    try:
        return str(process.environ().get(START_TOKEN, ""))
    except psutil.Error:
        return ""


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100] or process.name()
    except psutil.Error:
        return "gone"


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a text file, at most 64 KiB of it; empty if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
