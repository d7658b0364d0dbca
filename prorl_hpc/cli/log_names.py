"""Which log files a run has, and which of them a person means."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.job import Job

JOB = "job"
ROLES = {"rollout": ("coordinator", "worker"), "inference": ("inference",), "trainer": ("trainer",)}
_ENDINGS = (".log", ".out", ".err")


def log_files(run: RunDirectory) -> dict[str, Path]:
    """The logs of one attempt by name: processes first, then supervisors, launcher and srun; then the job's."""
    names = {file.stem: file for file in run.logs.iterdir() if file.suffix in _ENDINGS} if run.logs.is_dir() else {}
    files = {name: names[name] for name in sorted(names, key=_order)}
    job = Job.open(run)
    if job is not None:
        # submitit writes one pair of files a job, whatever its attempts
        outputs = sorted(run.jobs.glob(f"{job.record.job_id}_*log.*")) + sorted(run.jobs.glob("controller.log"))
        written = [file for file in outputs if file.stat().st_size]
        files |= {JOB if len(written) == 1 else f"{JOB}{file.suffix}": file for file in written}
    return files


def wanted_names(components: Sequence[str], known: Sequence[str], *, living: bool = False) -> list[str]:
    """Those of ``known`` that ``components`` mean, all without any. Raises ConfigError for one that means none, unless
    it may come to be in a run that is ``living``."""
    if not components:
        return list(known)
    chosen = [name for name in known if any(is_meant(component, name) for component in components)]
    for component in components:
        if not any(is_meant(component, name) for name in known) and not (living and may_come(component)):
            near = difflib.get_close_matches(component, [*known, *ROLES], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            allowed = ", ".join(dict.fromkeys([*ROLES, *known]))
            raise ConfigError(f"--component {component}: there is no such log; {hint}components: {allowed}")
    return chosen


def is_meant(component: str, name: str) -> bool:
    """``worker`` and ``rollout`` mean ``worker-0``, as it does itself."""
    return any(name == word or name.startswith((f"{word}-", f"{word}.")) for word in ROLES.get(component, (component,)))


def may_come(component: str) -> bool:
    """Whether it is the name of a log that runs have."""
    base = component.rpartition("-")[0] if component[-1:].isdigit() else component
    return base in (*ROLES, "coordinator", "worker", "node", "srun", "launcher", JOB)


def _order(name: str) -> tuple[int, str, int]:
    word, _, number = name.rpartition("-")
    word, place = (word, int(number)) if word and number.isdigit() else (name, 0)
    kinds = ("coordinator", "worker", "inference", "trainer", "node", "launcher", "srun")
    return (kinds.index(word) if word in kinds else len(kinds), word, place)
