"""``prorl-hpc serve [overrides] [--detach]``: the rollout service alone, for a trainer elsewhere.

As ``launch`` with ``trainer.enabled=false``; it tells how to connect once all its processes are ready.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys

from prorl_hpc.cli.composition import compose_all, show_help
from prorl_hpc.cli.launch import OWN_FLAGS, start_all
from prorl_hpc.cli.run_choice import add_run_argument, chosen_run
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.slurm.job import Job
from prorl_hpc.slurm.plan import Plan
from prorl_hpc.slurm.run_states import run_state

_WITHOUT_TRAINER = "trainer.enabled=false"
_USAGE = """usage: prorl-hpc serve [GROUP=CHOICE | SETTING=VALUE …] [--dry-run] [--detach]
       prorl-hpc serve --connect [RUN]

Starts the rollout service without a trainer, as `launch trainer.enabled=false` does, and tells how to connect to it once
it is ready. --detach comes back as soon as the job is submitted; --connect tells how to connect to one that runs.
The rest is that of launch:
"""


def main(argv: list[str]) -> int:
    """Exit codes: see __main__; --connect: 1 while the service is not ready, and when it has ended."""
    if "--connect" in argv:
        return _connect(argv)
    words = [word for word in argv if word not in OWN_FLAGS]
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        show_help(_alone(words))
        return 0
    composed = compose_all(_alone(words), OWN_FLAGS)
    if any(entry.config.trainer.enabled for entry in composed):
        raise ConfigError(
            "serve is for a trainer elsewhere, so trainer.enabled must be false: leave it out, or use launch"
        )
    return start_all(
        composed,
        dry_run="--dry-run" in argv,
        detach="--detach" in argv,
        attempt=_serve,
    )


def _alone(words: list[str]) -> list[str]:
    given = any(word.lstrip("+").startswith("trainer.enabled=") for word in words)
    return words if given else [*words, _WITHOUT_TRAINER]


def _serve(run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool) -> int:
    from prorl_hpc.cli.attempt import follow_and_tell, run_attempt

    code = run_attempt(run, config, plan, detach=True)
    if code != 0:
        return code
    if detach:
        print(f"connect: prorl-hpc serve --connect {shlex.quote(str(run.path))}")
        return code
    submitted = Job.open(run)
    if submitted is None:
        raise RunError(f"{run.path} has no job: nothing was started")
    return follow_and_tell(run, config, _AnnouncingJob(submitted, run, plan))


class _AnnouncingJob(Job):
    """A job that tells once how to connect, as soon as its service is ready and somebody asks whether it lives."""

    def __init__(self, job: Job, run: RunDirectory, plan: Plan) -> None:
        super().__init__(job.record, job.name)
        self._run, self._plan = run, plan
        self._was_ready = self._told = False

    def alive(self) -> bool:
        leaving = self._run.stop_marker.exists()  # all may become ready while it is told to stop
        if not self._told and not leaving and not waited_for(self._run, self._plan):
            if self._was_ready:  # and has been shown as that since then
                with contextlib.suppress(RunError):  # its coordinator went just now, and comes back
                    print(f"\n{connection_text(self._run)}\n", flush=True)
                    self._told = True
            self._was_ready = True
        return super().alive()


def waited_for(run: RunDirectory, plan: Plan) -> list[str]:
    """Names of the processes that are not ready."""
    states = {p.name: read_json(run.process_state(p.name), ProcessState) for p in plan.processes}
    return [name for name, state in states.items() if state is None or state.phase is not Phase.READY]


def connection_text(run: RunDirectory) -> str:
    """Addresses, token and the first call, for a service whose coordinator is ready. Raises RunError if it is not."""
    state = read_json(run.process_state("coordinator"), ProcessState)
    if state is None or state.phase is not Phase.READY:
        raise RunError(
            f"the coordinator of {run.run_id} is not ready: `prorl-hpc status {run.path}` tells what it waits for"
        )
    directory, token = shlex.quote(str(run.path)), shlex.quote(str(run.api_token_file))
    lines = [f"The rollout service of {run.run_id} is ready."]
    if http := state.endpoints.get("http"):
        lines += [
            f"  from anywhere:  {http}  (token: {run.api_token_file}, readable by you alone)",
            f'                  curl -H "Authorization: Bearer $(cat {token})" {http}/v1/status',
        ]
    if socket := state.endpoints.get("uds"):
        lines.append(f"  on {state.node}:  unix:{socket}  (no token)")
    lines += [
        "  from Python, where the run directory can be seen; it finds a requeued service again by itself:",
        "                  from prorl_hpc.service.client import RolloutClient",
        f'                  async with RolloutClient.for_run("{run.path}") as service:',
        "                      print(await service.status())",
        f"  end it:         prorl-hpc stop {directory}",
    ]
    return "\n".join(lines)


def _connect(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prorl-hpc serve", description="how to connect to a service that runs")
    parser.add_argument("--connect", action="store_true", required=True)
    add_run_argument(parser)
    run = chosen_run(parser.parse_args(argv).run, to_read=True)
    state = run_state(run)
    if not state.living:
        why = f" ({state.detail})" if state.detail else ""
        again = f"`prorl-hpc resume {run.path}` starts it again, `prorl-hpc serve` another"
        print(f"{run.run_id} is {state.word}{why}, so there is no service to connect to: {again}", file=sys.stderr)
        return 1
    plan = read_json(run.plan_file, Plan)
    waiting = waited_for(run, plan) if plan is not None else ["coordinator"]
    if waiting:
        print(f"not ready yet: {', '.join(waiting)}; `prorl-hpc status {run.path}` tells more", file=sys.stderr)
        return 1
    print(connection_text(run))
    return 0
