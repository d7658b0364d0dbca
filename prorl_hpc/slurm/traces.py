"""Whether the job of a run left anything behind in its directory, for a job that ended without a word."""

from __future__ import annotations

from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.job import Job


def storage_hint(run: RunDirectory, job: Job) -> str:
    """A sentence for people where nothing of a Slurm job came back, not even the file that Slurm makes for its output: its
    node does not see the directory, as a rule. Empty where something did."""
    if job.record.kind != "slurm" or any(run.jobs.glob(f"{job.record.job_id}_*_log.*")) or _any_file(run.logs):
        return ""
    return (
        f"nothing of it came back into {run.path}, not even the file that Slurm writes its output to: its nodes may not see "
        "that directory. run.root must be on storage that this machine and all nodes share; `prorl-hpc doctor "
        "cluster=… run.root=… --on-nodes` tries that"
    )


def _any_file(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())
