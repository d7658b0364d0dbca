"""``prorl-hpc launch [overrides] [--dry-run] [--detach]``: from a configuration to a run that is shown until it ends.

Imports come when they are needed: a typo is answered, and ``--help`` and ``--cfg job`` print, at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from prorl_hpc.cli.composition import Composed, compose_all, show_help
from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.config.policies import model_setting, models_of
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.validation import validate
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.plan import Plan, make_plan

OWN_FLAGS = ("--dry-run", "--detach")
_INTERRUPTED = 130


class Attempt(Protocol):
    """Submits a run, and shows it unless ``detach``; returns the exit code."""

    def __call__(self, run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool) -> int: ...


def main(argv: list[str]) -> int:
    """Exit codes: see __main__. Hydra's own flags (--cfg job, --multirun, --config-dir, …) work as everywhere."""
    if "--help" in argv or "-h" in argv:
        show_help([word for word in argv if word not in OWN_FLAGS])
        return 0
    flags = {word for word in argv if word in OWN_FLAGS}
    composed = compose_all([word for word in argv if word not in OWN_FLAGS], OWN_FLAGS)
    return start_all(composed, dry_run="--dry-run" in flags, detach="--detach" in flags)


def start_all(composed: list[Composed], *, dry_run: bool, detach: bool, attempt: Attempt | None = None) -> int:
    """Check all, then start all or, if one of them is wrong, none. Of a sweep a run that is refused or fails is told,
    and the others are started all the same. ``attempt``: how one is submitted and shown, cli.attempt.run_attempt."""
    if errors := all_errors(composed, starting=not dry_run):
        _tell_errors(errors)
        return 2
    # a sweep on a cluster comes back at once; on one machine its runs take turns
    detach = detach or (len(composed) > 1 and composed[0].config.cluster.kind == "slurm")
    codes: list[int] = []
    for entry in composed:
        if len(composed) > 1:
            print(f"\nrun {len(codes) + 1} of {len(composed)}: {' '.join(entry.overrides)}", flush=True)
        codes.append(_start(entry, dry_run=dry_run, detach=detach, attempt=attempt))
        if codes[-1] == _INTERRUPTED:
            break
    if len(composed) > 1:
        _tell_sweep(composed, codes, "submitted" if detach else "well")
    return _INTERRUPTED if _INTERRUPTED in codes else max(codes, default=0)


def _start(entry: Composed, *, dry_run: bool, detach: bool, attempt: Attempt | None) -> int:
    try:
        return _dry_run(entry.config) if dry_run else launch(entry, detach=detach, attempt=attempt)
    except ConfigError as error:
        print(f"prorl-hpc launch: {error}", file=sys.stderr)
        return 2


def launch(entry: Composed, *, detach: bool, attempt: Attempt | None = None) -> int:
    """Start one checked configuration in a new run directory. Raises ConfigError, leaving nothing behind, if Slurm
    refuses it."""
    from prorl_hpc.cli.environment_record import environment_record
    from prorl_hpc.cli.run_choice import link_latest
    from prorl_hpc.messages.codec import write_json
    from prorl_hpc.transport.keys import RunKeys

    config = with_absolute_paths(entry.config)
    if errors := _prepare_models(config):
        _tell_errors(errors)
        return 2
    plan = make_plan(config)
    root = Path(config.run.root)
    with _nothing_left_if_refused(root) as made:
        run = RunDirectory.create(config)
        made.append(run.path)
        RunKeys.create(run.keys)
        write_json(run.path / "environment.json", environment_record(entry.overrides))
        link_latest(run, root)
        return (attempt or _run_attempt)(run, config, plan, detach=detach)


def _prepare_models(config: ProrlConfig) -> list[str]:
    """Make the models that have no path yet, those of all policies; what is wrong with what was made."""
    errors: list[str] = []
    for policy, model in models_of(config).items():
        if not model.path:
            from prorl_hpc.cli.model import prepare_in_child
            from prorl_hpc.cli.preflight_model import check_model, named_for

            model.path = str(prepare_in_child(model.prepare))
            wrong = check_model(Path(model.path), model.thinking, model.tool_format)
            errors += [named_for(model_setting(policy), error) for error in wrong]
    return list(dict.fromkeys(errors))


def _run_attempt(run: RunDirectory, config: ProrlConfig, plan: Plan, *, detach: bool) -> int:
    from prorl_hpc.cli.attempt import run_attempt

    return run_attempt(run, config, plan, detach=detach)


@contextmanager
def _nothing_left_if_refused(root: Path) -> Iterator[list[Path]]:
    """Nothing ran before there is a job, so nothing stays if it comes to none: neither the run directory that the block
    puts into the list, nor the link to it, nor the directories above it that were made for it."""
    link = root / "latest"
    before = link.readlink() if link.is_symlink() else None
    absent = [path for path in (root, *root.parents) if not path.exists()]
    made: list[Path] = []
    try:
        yield made
    except BaseException:
        for path in made:
            if (path / "jobs" / "job.json").exists():
                raise
            shutil.rmtree(path)
            if link.is_symlink() and link.readlink().name == path.name:
                link.unlink() if before is None else _point(link, before)
            for directory in (path.parent, *absent):
                with contextlib.suppress(OSError):  # not empty: others' runs are there
                    directory.rmdir()
        raise


def _point(link: Path, target: Path) -> None:
    link.unlink()
    link.symlink_to(target)


def with_absolute_paths(config: ProrlConfig) -> ProrlConfig:
    """Paths that other nodes and a later ``resume`` can find, whatever their working directory."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else path

    task = dataclasses.replace(
        config.task,
        train=dataclasses.replace(config.task.train, path=absolute(config.task.train.path)),
        heldout=dataclasses.replace(config.task.heldout, path=absolute(config.task.heldout.path)),
    )
    image = config.sandbox.image
    script = config.engine.script
    if replay := script.get("replay"):
        script = {**script, "replay": absolute(replay)}
    cluster = config.cluster
    containers = {
        name: dataclasses.replace(part, container=absolute(part.container))
        for name in ("rollout", "inference", "trainer")
        if (part := getattr(cluster, name))
    }
    trainer = dataclasses.replace(
        config.trainer,
        kl_model=absolute(config.trainer.kl_model),
        deepspeed_file=absolute(config.trainer.deepspeed_file),
    )
    own = dataclasses.replace(cluster.container, image=absolute(cluster.container.image))
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, root=absolute(config.run.root)),
        model=dataclasses.replace(config.model, path=absolute(config.model.path)),
        policies={
            name: dataclasses.replace(policy, model=dataclasses.replace(policy.model, path=absolute(policy.model.path)))
            for name, policy in config.policies.items()
        },
        engine=dataclasses.replace(config.engine, script=script),
        sandbox=dataclasses.replace(config.sandbox, image=absolute(image) if Path(image).exists() else image),
        task=task,
        trainer=trainer,
        cluster=dataclasses.replace(cluster, container=own, **containers),
    )


def all_errors(composed: list[Composed], *, starting: bool) -> list[str]:
    """Of all runs; what is wrong with some of a sweep only says with which."""
    from prorl_hpc.cli.preflight import preflight, warnings

    owners: dict[str, list[Composed]] = {}
    for entry in composed:
        for error in dict.fromkeys(
            [*map(entry.with_file, validate(entry.config)), *preflight(entry.config, starting=starting)]
        ):
            owners.setdefault(error, []).append(entry)
    for warning in dict.fromkeys(
        warning for entry in composed for warning in warnings(entry.config, starting=starting)
    ):
        print(f"warning: {warning}", file=sys.stderr)
    return [
        error if len(entries) == len(composed) else f"{error} (in {'; '.join(' '.join(e.overrides) for e in entries)})"
        for error, entries in owners.items()
    ]


def _dry_run(config: ProrlConfig) -> int:
    """2 if Slurm would refuse the script, or does not answer."""
    from prorl_hpc.cli.plan_view import dry_run

    config = with_absolute_paths(config)
    for model in models_of(config).values():
        model.path = model.path or str(prepared_model(model.prepare))
    shown = dry_run(config, make_plan(config))
    print(shown.text)
    if shown.refused:
        print(f"prorl-hpc launch: {shown.refused}", file=sys.stderr)
    return 2 if shown.refused else 0


def _tell_errors(errors: list[str]) -> None:
    count = f"{len(errors)} things are" if len(errors) > 1 else "One thing is"
    print(f"{count} wrong, nothing was started:", file=sys.stderr)
    for error in errors:
        print(f"  - {error}", file=sys.stderr)


def _tell_sweep(composed: list[Composed], codes: list[int], word: str) -> None:
    print(f"\nsweep: {codes.count(0)} of {len(composed)} runs {word}")
    for i, entry in enumerate(composed):
        if i >= len(codes):
            print(f"  not started: {' '.join(entry.overrides)}")
        elif codes[i]:
            print(f"  exit code {codes[i]}: {' '.join(entry.overrides)}")
