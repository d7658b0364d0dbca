"""The configuration reference, made from the schemas: ``python -m prorl_hpc.config.reference > docs/configuration.md``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

from prorl_hpc.config import schema

_INTRO = """# Configuration reference

Made from the schemas by `python -m prorl_hpc.config.reference`; do not edit.

Every key can be overridden on the command line, `prorl-hpc launch trainer.steps=20 task.max_turns=5`;
a group is chosen by its name, `cluster=slurm model=path engine=vllm`. `--help` lists all groups, choices and settings,
`--cfg job` prints the composed configuration, `--dry-run` checks it and prints the plan, `--multirun` starts one run for
each combination of values with commas between. A setting that takes any name (a dict) takes new entries in the same way,
`cluster.extra.wckey=rl`; `'agent.files={notes.md: …}'` for a name with a dot in it. All that is wrong is told at once, before anything starts; in a file of yours, with its name.

**Your own groups.** A site's settings go into a file such as `cluster/mysite.yaml` (copy one of `cluster=site_*`, whose
`conf/cluster/site_gpu.yaml` has every setting with a comment) below one of these directories; `cluster=mysite` finds it:
`--config-dir DIR`, the directories of `$PRORL_CONF_DIR` (colons between them: a site can set it for all), and
`~/.config/prorl_hpc/conf` (`$XDG_CONFIG_HOME` in place of `~/.config` where it is set). So it goes with the other groups.
Give yours a name that none of ours has.

**Tab completion** of verbs and their flags, groups, choices, settings, runs, and a run's logs, nodes and processes: `eval "$(prorl-hpc completion bash)"` in `~/.bashrc`; `zsh` and
`fish` likewise.

**Who runs where.** `cluster.<component>.nodes=0`: not in this job (`inference`: servers are named by `engine.outside`, or
register over HTTP; `trainer`: with `trainer.enabled=false`, as `prorl-hpc serve` does). `same_nodes_as`: on the nodes
of another component. `rollout` must be somewhere, since the coordinator is there.
"""


def field_docs(cls: type) -> dict[str, str]:
    """The string literals that follow the fields in the class's source."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(after.value.value).split())
    return docs


def _rows(value: Any, prefix: str) -> list[str]:
    """One table row a field; nested dataclasses are flattened into dotted keys."""
    docs = field_docs(type(value))
    rows = []
    for field in dataclasses.fields(value):
        key, current = f"{prefix}.{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(current):
            rows += _rows(current, key)
        else:
            shown = f"`{current!r}`".replace("|", "\\|")
            rows.append(
                f"| `{key}` | {field.type} | {shown} | {docs.get(field.name, '').replace('|', chr(92) + '|')} |"
            )
    return rows


def reference() -> str:
    """The whole reference as Markdown."""
    parts = [_INTRO]
    config = schema.ProrlConfig()
    for field in dataclasses.fields(config):
        group, prefix = getattr(config, field.name), field.name
        if group == {}:  # policies by name: what one of them has
            group, prefix = schema.PolicyConfig(), f"{field.name}.NAME"
        parts.append(f"\n## `{field.name}`\n\n{inspect.getdoc(type(group))}\n")
        parts.append("| key | type | default of the schema | meaning |\n|---|---|---|---|")
        parts.append("\n".join(_rows(group, prefix)))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
