"""What one look at many runs costs: `status --watch` over run directories whose jobs a stand-in for Slurm knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, RunSettings
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.job import Job

PAUSE_S = 1
"""The shortest that `status --watch` takes."""
_PROGRAMS = ("squeue", "sacct", "scontrol", "sinfo")
_STAND_IN = """#!/bin/bash
# Notes the call; as squeue it knows every job that it is asked for.
echo "${0##*/}" >>"${0%/*}/calls"
[[ $0 == */squeue ]] || exit 1
while (($#)); do
  [[ $1 == -j ]] && ids=$2
  shift
done
for id in ${ids//,/ }; do
  echo "$id|RUNNING|None|2026-01-01T00:00:00|1:00:00"
done
"""


def measure(runs: int, cycles: int, say: Say) -> list[Figure]:
    """All runs live, so that none can be left out. RunError if the watching ends by itself."""
    with scratch_directory() as directory:
        calls = _stand_in(directory / "bin")
        for number in range(runs):
            run = RunDirectory.create(ProrlConfig(run=RunSettings(root=str(directory / "runs"))))
            Job.submitted(run, "slurm", str(1000 + number))
        say(f"{runs} runs are there")
        seconds = _watch(directory, runs, cycles)
        asked = calls.read_text().split()
    # The process is ended at a cycle's end, perhaps after the next call.
    per_cycle = len(asked) // cycles if len(asked) - cycles in (0, 1) else len(asked) / cycles
    detail = f"{cycles} cycles, calls: " + ", ".join(f"{name} {asked.count(name)}" for name in sorted(set(asked)))
    return [
        Figure.exactly(f"{runs} runs watched: calls of Slurm", per_cycle, 1, "a cycle", "the goal", detail),
        Figure.told(f"{runs} runs watched: CPU time of a cycle, mean", 1000 * seconds, "ms", "", detail),
    ]


def _stand_in(programs: Path) -> Path:
    """Slurm's commands that note that they were called; returns the file of notes."""
    programs.mkdir()
    for name in _PROGRAMS:
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    return programs / "calls"


def _watch(directory: Path, runs: int, cycles: int) -> float:
    """CPU seconds of a cycle, of all but the first: it keeps to the clock, so its pace says nothing."""
    environment = {
        **os.environ,
        "PRORL_HOME": str(directory / "home"),
        "PATH": f"{directory / 'bin'}:{os.environ.get('PATH', '')}",
    }
    words = [sys.executable, "-m", "prorl_hpc", "status", "--all", "--json", "--watch", str(PAUSE_S)]
    with subprocess.Popen(
        words, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as told:
        assert told.stdout is not None and told.stderr is not None
        try:
            _check(told.stdout.readline(), runs, told)
            began = _cpu_seconds(told.pid)
            for _ in range(cycles - 1):
                _check(told.stdout.readline(), runs, told)
            return (_cpu_seconds(told.pid) - began) / (cycles - 1)
        finally:
            told.kill()


def _cpu_seconds(pid: int) -> float:
    """Of the process and of what it has waited for, Slurm's commands among it."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _check(line: bytes, runs: int, told: subprocess.Popen[bytes]) -> None:
    if not line:
        assert told.stderr is not None
        raise RunError(f"`status --watch` ended by itself: {told.stderr.read().decode(errors='replace').strip()}")
    words = [row["status"] for row in json.loads(line)["runs"]]
    if words.count("running") != runs:
        raise RunError(f"`status --watch` shows {words.count('running')} of {runs} runs as running")
