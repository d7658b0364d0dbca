"""``prorl-hpc resume [RUN] [--fresh] [--detach] [OVERRIDES…]``: the same run in the same directory, as its next attempt.

It goes on from the newest checkpoint, and with what was recorded of the rollouts that were under way. OVERRIDES change
the stored settings (cluster.time_minutes=600 trainer.steps=200). Settings that decide what is ordered (task, model,
sampling, …) can be changed only with --fresh: what was recorded of open orders is given up then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_hpc.cli.attempt import run_attempt
from prorl_hpc.cli.config_changes import EXCEPTIONS, HARMLESS, changed_settings, needs_fresh, with_overrides
from prorl_hpc.cli.launch import with_absolute_paths
from prorl_hpc.cli.preflight import preflight
from prorl_hpc.cli.run_choice import chosen_run, link_latest
from prorl_hpc.cli.run_rows import last_step
from prorl_hpc.config.checkpoint_fit import fit_problems
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.run_lock import RunLock
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import save
from prorl_hpc.config.trainer_files import checkpoint_problems
from prorl_hpc.config.validation import validate
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.job import Job, strange_jobs
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.slurm.run_states import FINISHED, UNKNOWN, run_state
from prorl_hpc.transport.keys import RunKeys


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prorl-hpc resume", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RUN|OVERRIDE", help="the run (default: the newest); name=value")
    parser.add_argument("--fresh", action="store_true", help="give up what was recorded of orders that are still open")
    parser.add_argument("--detach", action="store_true", help="come back as soon as the job is submitted")
    args = parser.parse_intermixed_args(argv)
    given, overrides = _parted(args.words)
    run = chosen_run(given)
    with run.lock("resume") as lock:
        return _resume(run, overrides, lock, fresh=args.fresh, detach=args.detach)


def _resume(run: RunDirectory, overrides: list[str], lock: RunLock, *, fresh: bool, detach: bool) -> int:
    _check_over(run)
    old = run.load_config()
    changed, wrong = with_overrides(old, overrides)
    new = with_absolute_paths(changed)
    changes = changed_settings(old, new)
    no_more = new.trainer.steps <= int(last_step(run).get("step", old.trainer.steps))
    if not wrong and no_more and run_state(run).word == FINISHED:
        print(
            f"{run.run_id} is finished: there is nothing to go on with, unless with more steps (trainer.steps="
            f"{2 * new.trainer.steps}). Its report: {run.report_file}"
        )
        return 0
    wrong += [] if fresh else _harm(changes)
    wrong += _too_few_steps(run, new)
    wrong += [*validate(new), *preflight(new)]
    if errors := [*wrong, *checkpoint_problems(new, run.checkpoints), *fit_problems(new, run.checkpoints)]:
        print("\n".join(["The run cannot go on:", *(f"  - {error}" for error in errors)]), file=sys.stderr)
        return 2
    for name, (before, after) in changes.items():
        print(f"{name}: {before} → {after}")
    RunKeys.load(run.keys)
    plan = make_plan(new)
    if new.cluster.kind == "slurm":
        _check_no_other_job(run)
    with _as_before_if_refused(run, lock):
        if changes:
            _save(run, new)
        if fresh:
            from prorl_hpc.rollout.epoch import begin_new_epoch

            begin_new_epoch(run)
        link_latest(run, Path(new.run.root))
        return run_attempt(run, new, plan, detach=detach, lock=lock)


def _parted(words: list[str]) -> tuple[str | None, list[str]]:
    """The run, and the overrides: those have a = (or a ~ before them)."""
    overrides = [word for word in words if ("=" in word or word.startswith("~")) and not Path(word).exists()]
    runs = [word for word in words if word not in overrides]
    if len(runs) > 1:
        raise ConfigError(f"{' '.join(runs)}: give one run; overrides are written name=value")
    return next(iter(runs), None), overrides


def _check_over(run: RunDirectory) -> None:
    state = run_state(run)
    job = state.job.description if state.job else ""
    if state.word == UNKNOWN:
        raise RunError(f"it is not known whether {run.path} still runs: {state.detail}")
    if state.living:
        raise RunError(f"{run.path} still runs as {job} ({state.word}): stop it first with `prorl-hpc stop {run.path}`")


def _check_no_other_job(run: RunDirectory) -> None:
    if others := strange_jobs(run, Job.open(run)):
        raise RunError(
            f"{run.path} may still run, though not as the job that it has on record: {', '.join(others)}. Wait until it is "
            "gone, or end it with scancel"
        )


def _too_few_steps(run: RunDirectory, config: ProrlConfig) -> list[str]:
    done = int(last_step(run).get("step", 0))
    if not config.trainer.enabled or config.trainer.steps >= done:
        return []
    return [f"trainer.steps={config.trainer.steps}: the run has done {done} steps already; give more than {done}"]


def _harm(changes: Iterable[str]) -> list[str]:
    """What would become wrong by those that need --fresh."""
    harmful = [name for name in changes if needs_fresh(name)]
    if not harmful:
        return []
    return [
        f"{', '.join(harmful)} decide{'s' if len(harmful) == 1 else ''} what is ordered of the rollout service, and "
        "this run has orders that are recorded with the old value: give --fresh too, which gives up what is recorded "
        "of open orders (weights, optimizer and finished steps stay), or launch a new run. Without it can be changed: "
        f"{', '.join(HARMLESS)}; but not {', '.join(EXCEPTIONS)}"
    ]


@contextmanager
def _as_before_if_refused(run: RunDirectory, lock: RunLock) -> Iterator[None]:
    """An attempt that never came to be leaves no trace in the run: neither its settings, nor a new epoch. ``lock`` is
    released when it has come to be."""
    stored = {file: _bytes(file) for file in (run.config_file, run.epoch_file, run.plan_file)}
    try:
        yield
    except BaseException:
        if not lock.held:
            raise
        for file, content in stored.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content)
        raise


def _save(run: RunDirectory, config: ProrlConfig) -> None:
    """Aside, then renamed: a configuration that is half written would be the end of the run."""
    aside = run.config_file.with_name(".config.yaml.new")
    save(config, aside)
    aside.replace(run.config_file)


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None
