"""Ctrl-C of a series on a Slurm cluster of this machine's own: the run under way is stopped in order, and nothing stays."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prorl_hpc.bench.scaling_records import RESULTS_FILE
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.endings import Ending, read_ending
from prorl_hpc.slurm.private.base import missing

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing("namespaced")), reason=f"no private Slurm cluster: {missing('namespaced')}"),
]
SHORT = ["task.options.kinds.math.turns=constant:1", "task.options.kinds.math.turn_tokens=constant:20"]
WORDS = ["nodes=1", "--private", "workload=math-like", "task.train.size=4", "rollouts=4", "sandbox=local", *SHORT]


def bench(*words: str) -> list[str]:
    return [sys.executable, "-m", "prorl_hpc", "bench", "scaling", *words]


@contextlib.contextmanager
def on_a_terminal(command: list[str]) -> Iterator[tuple[int, int]]:
    """Its pid, and the terminal that controls it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    try:
        yield pid, terminal
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)


def read_to_the_end(terminal: int) -> str:
    said = b""
    with contextlib.suppress(OSError):  # EIO: nobody has it open any more
        while part := os.read(terminal, 4096):
            said += part
    return said.decode(errors="replace")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def cluster_of(pid: int) -> Path:
    """The directory of the cluster that the command has started."""
    (words,) = [child.cmdline() for child in psutil.Process(pid).children() if "cluster" in child.cmdline()]
    return Path(words[words.index("start") + 1]).parent


def left_of(directory: Path) -> list[list[str]]:
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [words for words in found if any(str(directory) in word for word in words)]


def test_ctrl_c_stops_the_run_in_order_and_nothing_stays(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    note = folder / "points" / "nodes-1.run"
    with on_a_terminal(bench(*WORDS, f"out={folder}")) as (pid, terminal):
        wait_for(note)
        run = RunDirectory.open(note.read_text().strip())
        wait_for(run.status_file)
        directory = cluster_of(pid)
        os.write(terminal, b"\x03")
        said = read_to_the_end(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130, said
    assert f"go on with: prorl-hpc bench scaling out={folder}" in "".join(said.split("\r\n"))
    assert "without a word" not in said  # nodes share the folder, though it is below /tmp
    ending = read_ending(run)
    assert ending is not None and ending.ending is Ending.STOPPED, said
    assert not directory.exists() and not left_of(directory)

    # it goes on; once it has told where the report is, Ctrl-C changes nothing any more, and the cluster is taken down
    page = tmp_path / "page" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text("<!-- bench scaling -->\n<!-- end -->\n")
    with subprocess.Popen(bench(f"out={folder}", "--write", str(page)), stdout=subprocess.PIPE, text=True) as going_on:
        wait_for(note)
        directory = cluster_of(going_on.pid)
        assert going_on.stdout is not None
        for line in going_on.stdout:
            if line.startswith("report:"):
                break
        while going_on.poll() is None:
            going_on.send_signal(signal.SIGINT)
            time.sleep(0.1)
    assert going_on.returncode in (0, 1)
    assert (folder / RESULTS_FILE).exists()
    assert "| rate at 1 node |" in page.read_text()  # nodes see where it is, too
    assert not directory.exists() and not left_of(directory)
