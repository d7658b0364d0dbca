"""Submission through submitit: its local executor on this machine, or one (heterogeneous) Slurm job."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.run_lock import RunLock
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.cluster_name import ClusterQuestion
from prorl_hpc.slurm.environment import submission_unset
from prorl_hpc.slurm.job import Job, job_name
from prorl_hpc.slurm.launcher import launch_attempt
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.refusals import explain_refusal
from prorl_hpc.slurm.script import components, render
from prorl_hpc.slurm.states import JobPhase, job_states

_A_YEAR_MIN = 525_600


class DetachedLocalExecutor(LocalExecutor):  # type: ignore[misc]
    """submitit's local executor in a session of its own, so that Ctrl-C reaches ``launch`` alone (submitit's
    controller would kill the supervisor a second later) and the GPUs stay visible."""

    def _submit_command(self, command: str) -> LocalJob[Any]:
        environ = {
            **os.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(_A_YEAR_MIN * 60),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        with (self.folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "submitit.local._local", str(self.folder)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process)


class StateWatcher(SlurmInfoWatcher):  # type: ignore[misc]
    """submitit's view of job states, through squeue first: it works without accounting."""

    def update(self) -> None:
        wanted = sorted(self._registered - self._finished)
        self._num_calls += 1
        states = job_states(wanted)
        self._info_dict.update({job_id: {"JobID": job_id, "State": state} for job_id, state in states.items()})
        self._finished |= {job_id for job_id, state in states.items() if JobPhase.of(state) is JobPhase.ENDED}


class HetSlurmJob(SlurmJob):  # type: ignore[misc]
    watcher = StateWatcher(delay_s=5)


class HetSlurmExecutor(SlurmExecutor):  # type: ignore[misc]
    """One job for all components. What submitit runs, once, is the launcher on the job's first node."""

    job_class = HetSlurmJob

    def __init__(self, folder: Path, script: Callable[[str], str]) -> None:
        """``script``: the text for the command that it is to run."""
        super().__init__(folder)
        self._script = script

    @classmethod
    def name(cls) -> str:
        return "slurm"

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        raise ValueError(
            f"unknown parameters {', '.join(sorted(kwargs))}: this executor takes its options from ClusterConfig "
            "alone (cluster.*, cluster.extra, cluster.<component>.extra)"
        )

    def _num_tasks(self) -> int:
        return 1

    @property
    def _submitit_command_str(self) -> str:
        return launcher_command(self.folder)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script(command)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [word for name in submission_unset(os.environ) for word in ("-u", name)]
        # In a session of its own: an sbatch that Ctrl-C ends may have submitted, and could not tell the id any more.
        return ["setsid", "env", *unset, "sbatch", str(submission_file_path)]


def launcher_command(folder: Path) -> str:
    """What the job runs: submitit with the pickled launcher. The Python of the login node, which all nodes share."""
    return f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"


def sbatch_text(run: RunDirectory, config: ProrlConfig, plan: Plan) -> str:
    """The script that ``submit`` would hand to sbatch."""
    parts = components(config.cluster, plan)
    return render(job_name(run), run.jobs, parts, config.cluster, launcher_command(run.jobs))


def submit(run: RunDirectory, config: ProrlConfig, plan: Plan, lock: RunLock | None = None) -> Job:
    """Write the plan and start the launcher of the next attempt. ``lock``: the run's, where the caller has it; it is
    released as soon as the job is written down. Raises ConfigError if Slurm refuses; then no attempt was begun."""
    if lock is None:
        with run.lock("launch") as own:
            return submit(run, config, plan, own)
    newest = run.newest_attempt
    begun = Job.open(run) is not None or any(RunDirectory(run.path, newest).state.iterdir())
    attempt = newest + 1 if begun else newest
    run.begin_attempt(attempt, new=begun)
    try:
        write_json(run.plan_file, plan)
        job = _submitted(run, config, plan, attempt)
    except BaseException:
        if begun:
            run.withdraw_attempt(attempt)
        raise
    lock.release()
    return job


def _submitted(run: RunDirectory, config: ProrlConfig, plan: Plan, attempt: int) -> Job:
    if config.cluster.kind == "local":
        job = DetachedLocalExecutor(run.jobs).submit(launch_attempt, str(run.path), attempt)
        return Job.submitted(run, "local", job.job_id, attempt)
    parts = components(config.cluster, plan)

    def script(command: str) -> str:
        return render(job_name(run), run.jobs, parts, config.cluster, command)

    cluster = ClusterQuestion()
    try:
        job = HetSlurmExecutor(run.jobs, script).submit(launch_attempt, str(run.path), attempt)
    except (FailedJobError, FailedSubmissionError, RuntimeError) as error:
        raise ConfigError(explain_refusal(str(error), config)) from error
    finally:
        name = cluster.answer()
    return Job.submitted(run, "slurm", job.job_id, attempt, name)
