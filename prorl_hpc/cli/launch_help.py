"""``launch --help``: the flags, every group with its choices, every setting with its value and what it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorl_hpc.config.reference import field_docs
from prorl_hpc.config.schema import PolicyConfig, ProrlConfig
from prorl_hpc.config.store import conf_dir, user_conf_dirs

_HEAD = """usage: prorl-hpc launch [GROUP=CHOICE | SETTING=VALUE …] [--dry-run] [--detach] [Hydra's flags]

Composes a configuration, checks it, and starts one run: on this machine, or as one Slurm job.

  prorl-hpc launch                              the default run, on this machine
  prorl-hpc launch experiment=quick             every part, a tiny model, few steps
  prorl-hpc launch cluster=site_gpu --dry-run   the plan and the sbatch script; nothing is started
  prorl-hpc launch --multirun trainer.learning_rate=1e-5,3e-5
                                                one run for each value; on Slurm all are submitted at once

  --dry-run         print the plan, the script and what sbatch says of it; start nothing
  --detach          come back as soon as the job is submitted
  --multirun, -m    one run for every combination of values with commas between
  --cfg job         print the composed configuration
  --config-dir DIR  a directory of your own groups (DIR/cluster/mysite.yaml, then cluster=mysite); those in
                    $PRORL_CONF_DIR and ~/.config/prorl_hpc/conf are found without the flag
  --hydra-help      Hydra's own flags
Exit codes: 0 all well, 1 the run failed, 2 something given is wrong and nothing was started, 130 Ctrl-C, which stops the
run. SIGTERM, a closed terminal and a closed output (143, 129, 141) stop a run on this machine too (130); of a run on Slurm
they end the view alone, and the job goes on."""


def help_text(config: ProrlConfig, own_dir: Path | None = None) -> str:
    """``config``: whose values are shown; ``own_dir``: what ``--config-dir`` named."""
    parts = [_HEAD, "\nGroups (GROUP=CHOICE):"]
    for group, choices in group_choices(own_dir).items():
        parts.append(f"  {group}")
        width = max(len(name) for name in choices)
        parts += [f"    {name:<{width}}  {first_comment(path)}".rstrip() for name, path in choices.items()]
    parts.append("\nSettings (SETTING=VALUE), here with the values that the words on this command line make:")
    groups = {group.name: getattr(config, group.name) for group in dataclasses.fields(config)}
    named = groups["policies"] or {"NAME": PolicyConfig()}
    groups |= {f"policies.{name}": policy for name, policy in named.items()}
    parts += [line for name, group in groups.items() if name != "policies" for line in _settings(group, name)]
    return "\n".join(parts)


def group_choices(own_dir: Path | None = None) -> dict[str, dict[str, Path]]:
    """Group → choice → file; the first directory that has it counts, as for Hydra."""
    found: dict[str, dict[str, Path]] = {}
    for root in [conf_dir(), *([own_dir] if own_dir else []), *user_conf_dirs()]:
        for path in sorted(root.glob("*/*.yaml")):
            found.setdefault(path.parent.name, {}).setdefault(path.stem, path)
    return {group: dict(sorted(choices.items())) for group, choices in sorted(found.items()) if group != "hydra"}


def first_comment(path: Path) -> str:
    """The first sentence of the file's first comment: what the choice is."""
    words: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").strip()
        if text.startswith("@package"):
            continue
        words.append(text)
        if text.endswith((".", ":")):
            break
    return _first_sentence(" ".join(words))


def _settings(value: Any, prefix: str) -> Iterator[str]:
    docs = field_docs(type(value))
    for field in dataclasses.fields(value):
        name, current = f"{prefix}.{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(current):
            yield from _settings(current, name)
            continue
        line = f"  {name}={_shown(current)}"
        yield f"{line:<46}  {_first_sentence(docs.get(field.name, ''))}".rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def _first_sentence(text: str) -> str:
    for end in (". ", "; "):
        text = text.split(end)[0]
    return text.rstrip(".:")
