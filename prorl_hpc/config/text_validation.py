"""Characters that do not belong into settings: those that would end a line of the sbatch script, cannot be an argument of a
program, or cannot be written into a file."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterator
from typing import Any

from prorl_hpc.config.schema import ProrlConfig

_LONGEST = 4_000
"""Characters of one setting that becomes part of the script; sbatch reads words of up to 8 KiB."""
_SEEN_NAMES = """run.name run.root account qos reservation licenses mail_user partition constraint nodelist exclude gpu_type cpu_bind
interface modules mail_type same_nodes_as kind gpu_option"""
_SEEN_ELSEWHERE = frozenset(_SEEN_NAMES.split())
"""Names, and settings of ``cluster``, whose own rule allows no such character."""
_PATH_NAMES = """run.root run.runtime_root model.path trainer.kl_model trainer.deepspeed_file sandbox.image task.train.path
task.heldout.path cluster.container.image
cluster.rollout.container cluster.inference.container cluster.trainer.container"""
_PATHS = frozenset(_PATH_NAMES.split())
_WITH_TABS = ("setup", "sbatch_lines")


def text_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence."""
    for name, text in _texts("", config):
        last = name.rpartition(".")[2]
        if (name in _PATHS or name.endswith(".model.path")) and any(
            len(part.encode(errors="replace")) > 255 for part in text.split("/")
        ):
            yield f"{name}={text[:80]}… is no path: a name in it is longer than the 255 bytes that file systems take"
        if name in _SEEN_ELSEWHERE:
            continue
        if name.startswith(("cluster.", "run.")):
            if last in _SEEN_ELSEWHERE:
                continue
            allowed = "\t" if last in _WITH_TABS else ""
            # a line break in one of these has an answer of its own
            wrong = "" if last in _WITH_TABS and "\n" in text else _unprintable(text, allowed)
            if len(text) > _LONGEST:
                yield f"{name} is {len(text)} characters long: must be at most {_LONGEST}"
        else:
            wrong = "".join(sign for sign in text if sign == "\0" or unicodedata.category(sign) == "Cs")
        if wrong:
            signs = " ".join(dict.fromkeys(map(ascii, wrong)))
            yield f"{name}={text[:80]!r} has {signs} in it: must be one line of text without control characters"


def _unprintable(text: str, allowed: str) -> str:
    return "".join(
        sign for sign in text if sign not in allowed and unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")
    )


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """All strings in ``value``, keys of dictionaries too, by the name of their setting."""
    if isinstance(value, str):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _texts(f"{name}.{field.name}".lstrip("."), getattr(value, field.name))
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _texts(name, str(key))
            yield from _texts(f"{name}.{key}", entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(name, entry)
