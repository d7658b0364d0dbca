"""``prorl-hpc launch [overrides] [--dry-run] [--detach]``: from a configuration to a run that is shown until it ends.

Imports come when they are needed: a typo is answered, and ``--help`` and ``--cfg job`` print, at once.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from prorl_hpc.cli.composition import Composed, compose_all
from prorl_hpc.cli.run_choice import link_latest
from prorl_hpc.config.model_directory import prepared_model
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.validation import validate
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.plan import make_plan

_OWN_FLAGS = ("--dry-run", "--detach")


def main(argv: list[str]) -> int:
    """Exit codes: see __main__. Hydra's own flags (--cfg job, --multirun, --config-dir, …) work as everywhere."""
    flags = {word for word in argv if word in _OWN_FLAGS}
    composed = compose_all([word for word in argv if word not in _OWN_FLAGS])
    if errors := [error for entry in composed for error in _errors(entry.config)]:
        _tell_errors(errors)
        return 2
    # a sweep on a cluster comes back at once; on one machine its runs take turns
    detach = "--detach" in flags or (len(composed) > 1 and composed[0].config.cluster.kind == "slurm")
    for entry in composed:
        code = _dry_run(entry.config) if "--dry-run" in flags else launch(entry, detach=detach)
        if code != 0:
            return code
    return 0


def launch(entry: Composed, *, detach: bool) -> int:
    """Start one checked configuration in a new run directory."""
    from prorl_hpc.cli.attempt import run_attempt
    from prorl_hpc.cli.environment_record import environment_record
    from prorl_hpc.transport.keys import RunKeys

    config = with_absolute_paths(entry.config)
    if not config.model.path:
        from prorl_hpc.cli.model import prepare_in_child
        from prorl_hpc.cli.preflight import check_model

        config.model.path = str(prepare_in_child(config.model.prepare))
        if errors := check_model(Path(config.model.path)):
            _tell_errors(errors)
            return 2
    plan = make_plan(config)
    run = RunDirectory.create(config)
    try:
        RunKeys.create(run.keys)
        write_json(run.path / "environment.json", environment_record(entry.overrides))
        link_latest(run, Path(config.run.root))
        return run_attempt(run, config, plan, detach=detach)
    except ConfigError:  # the submission was refused: nothing ran, so nothing stays
        shutil.rmtree(run.path)
        (Path(config.run.root) / "latest").unlink(missing_ok=True)
        raise


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
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, root=absolute(config.run.root)),
        model=dataclasses.replace(config.model, path=absolute(config.model.path)),
        sandbox=dataclasses.replace(config.sandbox, image=absolute(image) if Path(image).exists() else image),
        task=task,
    )


def _errors(config: ProrlConfig) -> list[str]:
    from prorl_hpc.cli.preflight import preflight

    return [*validate(config), *preflight(config)]


def _dry_run(config: ProrlConfig) -> int:
    from prorl_hpc.cli.plan_view import dry_run_text

    config = with_absolute_paths(config)
    config.model.path = config.model.path or str(prepared_model(config.model.prepare))
    print(dry_run_text(config, make_plan(config)))
    return 0


def _tell_errors(errors: list[str]) -> None:
    count = f"{len(errors)} things are" if len(errors) > 1 else "One thing is"
    print(f"{count} wrong, nothing was started:", file=sys.stderr)
    for error in dict.fromkeys(errors):
        print(f"  - {error}", file=sys.stderr)
