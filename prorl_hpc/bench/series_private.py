"""Runs a series on a Slurm cluster of this machine's own, whose nodes are namespaces: from its login node."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from prorl_hpc.bench.launch_cluster import private_cluster
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.scaling_records import Series
from prorl_hpc.bench.series_launch import last
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.cli.following import ENDING, ignore_signals
from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.config.store import user_conf_dirs
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.private.base import missing
from prorl_hpc.slurm.private.shape import MOST_NODES


def nodes_needed(series: Series) -> int:
    """Of the cluster: a point has as many CPU nodes as inference nodes. Raises ConfigError for more than there can be."""
    most = max(spec.nodes for spec in series.points)
    if 2 * most > MOST_NODES:
        raise ConfigError(
            f"nodes={most}: a cluster of this machine's own has at most {MOST_NODES} nodes, and a point needs as many "
            f"inference nodes as CPU nodes: nodes= at most {MOST_NODES // 2}, and --simulate nodes=… beyond"
        )
    return 2 * most


def run_in_private_cluster(series: Series, folder: Path, words: Sequence[str], say: Say, *seen: Path) -> int:
    """The exit code of the same command on the login node, which sees the directories ``seen``; the cluster is gone
    afterwards, whatever signals come. Raises ConfigError or RunError where there can be no such cluster."""
    nodes = nodes_needed(series)
    if reason := missing("namespaced"):
        raise RunError(f"--private: no Slurm cluster of this machine's own: {reason}. --local needs none")
    inner = _Inner(say)
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_directory() as directory:
        say(f"a Slurm cluster of this machine's own with {nodes} nodes starts")
        shared = {folder, prorl_home(), *user_conf_dirs(), *_recorded(series), *(path.absolute() for path in seen)}
        with private_cluster(directory, *shared, cpu_nodes=nodes, gpu_nodes=0) as cluster:
            own = [word for word in words if not word.startswith("out=")]
            command = [sys.executable, "-m", "prorl_hpc", "bench", "scaling", *own, f"out={folder}", "--inside"]
            return inner.run(cluster.command(command))


def _recorded(series: Series) -> set[Path]:
    """Runs that points replay."""
    named = {last(spec.overrides, "task.options.recorded") for spec in series.points}
    return {Path(name) for name in named if name}


class _Inner:
    """The command on the login node, to which the signals that end this one are passed on, from here to this process's end:
    it stops its run in order and says how to go on, while the cluster is there. Nothing interrupts the taking down."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._came = 0
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._pass_on)

    def run(self, command: list[str]) -> int:
        """Its exit code; 128 and the signal's number where one came before it, or ended it."""
        if self._came:
            self._say("interrupted before the series went on: the same command does")
            return 128 + self._came
        # A session of its own: a terminal's Ctrl-C would reach nsenter too, which ends without its command.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        if self._came:  # between the question and the start
            self._send(self._came)
        code = self._process.wait()
        ignore_signals()  # to the exit of this process: an interpreter that ends undoes what it has set of its own
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._came = number
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            nsenter = psutil.Process(self._process.pid)
            for process in nsenter.children() or [nsenter]:
                process.send_signal(number)
