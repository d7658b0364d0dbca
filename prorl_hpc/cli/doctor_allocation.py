"""Doctor on the nodes: one node of each component for a minute, each examined, all against each other."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from prorl_hpc.cli.doctor_meeting import RACES
from prorl_hpc.cli.doctor_node import NodeReport
from prorl_hpc.cli.findings import Finding, judged
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import save
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.slurm.script import Component, components
from prorl_hpc.slurm.trial_allocation import TrialAllocation

_MINUTES = 5
_WORK_S = 240.0
_SAID_LINES = 3
_USUAL = re.compile(r"queued and waiting|has been allocated")


def examine_nodes(config: ProrlConfig, queue_s: float, tell: Callable[[str], None]) -> Iterator[Finding]:
    """``queue_s``: how long the allocation may wait in the queue. Leaves nothing behind, Ctrl-C included."""
    parts = components(config.cluster, make_plan(config))
    root = Path(config.run.root).absolute()
    directory = root / f".prorl-doctor-{secrets.token_hex(4)}"
    made = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"run.root={config.run.root} cannot be written: {error.strerror}") from error
    try:
        names = [part.name for part in parts]
        save(config, directory / "config.yaml")
        (directory / "names").write_text(" ".join(names))
        (directory / "token").touch(mode=0o600)
        (directory / "token").write_text(secrets.token_hex(16))
        command = [sys.executable, "-m", "prorl_hpc", "doctor"]
        commands = {name: [*command, "--node", name, "--meet", str(directory)] for name in names}
        trial = TrialAllocation(config.cluster, parts, commands, directory / "srun.log", _MINUTES)
        with _terminable():
            try:
                trial.start()
                wrong = trial.wait(queue_s, _WORK_S, tell)
            finally:
                trial.end()
        yield from merge(directory, parts, trial, wrong)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError):  # somebody uses it meanwhile
                path.rmdir()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, with the job."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def merge(directory: Path, parts: list[Component], trial: TrialAllocation, wrong: str) -> Iterator[Finding]:
    """What the nodes reported, and what is known of those that did not."""
    reports = {part.name: read_json(directory / f"{part.name}.json", NodeReport) for part in parts}
    yield _allocation(trial, wrong, complete=all(reports.values()))
    for place, part in enumerate(parts if trial.last.nodes or any(reports.values()) else []):
        report = reports[part.name]
        if report is None:
            yield _silent(part.name, trial, place, directory.parent)
            continue
        where = f"{part.name} on {report.host}"
        yield _same_code(report, where)
        yield from (replace(finding, where=where) for finding in report.findings)
    there = [report for report in reports.values() if report is not None]
    if len(there) > 1 and len(there) == len(parts):
        won = sum(report.races_won for report in there)
        found = f"{RACES} files that all nodes created at once were made {won} times"
        cure = "set run.root to storage where O_EXCL holds between nodes: two could become attempt 1"
        yield judged("exclusive creation", found, cure, good=won == RACES, grade="fail")


def _allocation(trial: TrialAllocation, wrong: str, *, complete: bool) -> Finding:
    said = _last_lines(trial.said())
    job = f"job {trial.last.job_id}" if trial.last.job_id else "no job"
    if not wrong or complete:
        nodes = ", ".join(trial.last.nodes.values())
        return Finding("ok", "allocation", f"{job}{f' on {nodes}' if nodes else ''}")
    cure = "try other settings of cluster.<component>, or look at `sinfo` and `squeue --start`"
    if trial.last.nodes:  # it was given; its nodes are at fault
        cure = "see what is said of its nodes"
    return Finding("fail", "allocation", f"{job}: {wrong}{f': {said}' if said else ''}", cure)


def _silent(name: str, trial: TrialAllocation, place: int, root: Path) -> Finding:
    node = trial.last.nodes.get(place, "")
    lost = re.findall(r"Node failure on ([\w.-]+)", trial.said())
    if lost and node not in lost:
        cure = f"see {' and '.join(lost)}; a job ends when a component has no node left"
        return Finding("warn", "node", f"not examined, for the job lost {', '.join(lost)}", cure, _at(name, node))
    lines = [line for line in trial.said().splitlines() if line.startswith(f"{place}: ") or (node and node in line)]
    said = _last_lines("\n".join(lines))
    cure = (
        f"the node must be up, on the network, and see {sys.executable} and {root} (set run.root to storage that "
        "all nodes and this machine share); cluster.setup must not fail there"
    )
    return Finding("fail", "node", f"nothing was heard of it: {said or 'Slurm says nothing'}", cure, _at(name, node))


def _at(name: str, node: str) -> str:
    return f"{name} on {node}" if node else name


def _last_lines(text: str) -> str:
    lines = [re.sub(r"^\d+: ", "", f"{line.strip()} ").strip() for line in text.splitlines() if not _USUAL.search(line)]
    return " / ".join(list(dict.fromkeys(line for line in lines if line))[-_SAID_LINES:])


def _same_code(report: NodeReport, where: str) -> Finding:
    here = (".".join(map(str, sys.version_info[:3])), metadata.version("prorl_hpc"))
    found = f"Python {report.python}, prorl_hpc {report.version}"
    cure = f"here it is Python {here[0]}, prorl_hpc {here[1]}: use one environment on shared storage"
    return replace(
        judged("same code", found, cure, good=here == (report.python, report.version), grade="fail"), where=where
    )
