"""No process of a bench outlives it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from prorl_hpc.bench.processes import Processes
from prorl_hpc.messages.errors import RunError

_STRAY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
"""


def test_a_childs_child_in_a_session_of_its_own_is_killed_too(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("stray", [sys.executable, "-c", _STRAY])
        assert processes.wait("stray", 30) == 0
        pid = int((tmp_path / "stray.log").read_text())
        assert psutil.Process(pid).is_running()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_death_is_told_with_the_last_lines(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("short", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"])
        while processes.runs("short"):
            time.sleep(0.02)
        processes.check(but="short")
        with pytest.raises(RunError, match=r"short ended with exit code 3.*\n  short: last words"):
            processes.check()


def test_one_that_does_not_end_is_killed_and_told(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("long", [sys.executable, "-c", "import time; time.sleep(600)"])
        pid = processes.pid("long")
        with pytest.raises(RunError, match=r"did not end within 0\.1 s"):
            processes.wait("long", 0.1)
        assert not psutil.pid_exists(pid)


def test_a_name_can_be_used_again_after_a_kill(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        for _ in range(2):
            processes.start("again", [sys.executable, "-c", "import time; time.sleep(600)"])
            processes.kill("again")
        assert not processes.runs("again")
