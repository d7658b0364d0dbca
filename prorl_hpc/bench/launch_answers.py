"""How soon the verbs answer that people type most, as processes of their own, and which heavy modules they load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.samples import Samples
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, RunSettings
from prorl_hpc.messages.errors import RunError
from prorl_hpc.tasks.testing import write_chat_model

GOAL_S = 1.0
HEAVY = ("torch", "vllm", "transformers")
_PROGRAM = ("-m", "prorl_hpc")
_FLOORS = {"python -c pass": ("-c", "pass"), "python -c 'import hydra'": ("-c", "import hydra")}
_TIMEOUT_S = 60.0


class Asked(NamedTuple):
    """A process: words behind ``python``; ``bare``: it finds no programs, so no Slurm, whose time is not ours."""

    words: tuple[str, ...]
    bare: bool = False


def verbs(directory: Path) -> dict[str, Asked]:
    """By name."""
    dry = (*_PROGRAM, "launch", "experiment=quick", f"model.path={directory / 'model'}", "--dry-run")
    return {
        "launch --help": Asked((*_PROGRAM, "launch", "--help")),
        "launch --dry-run": Asked(dry),
        "launch cluster=slurm --dry-run": Asked((*dry, "cluster=slurm"), bare=True),
        "status": Asked((*_PROGRAM, "status")),
    }


def measure(rounds: int, say: Say) -> list[Figure]:
    """Verbs and floors take turns. RunError if one of them fails."""
    with scratch_directory() as directory:
        furnish(directory)
        asked = verbs(directory) | {name: Asked(words) for name, words in _FLOORS.items()}
        taken: dict[str, list[float]] = {name: [] for name in asked}
        for name in asked:
            _call(asked[name], directory)  # compiles what was not compiled
            say(f"{name} answers")
        for _ in range(rounds):
            for name in asked:
                began = time.perf_counter()
                _call(asked[name], directory)
                taken[name].append(time.perf_counter() - began)
        samples = {name: Samples(seconds) for name, seconds in taken.items()}
        loaded = {name: heavy_modules(asked[name], directory) for name in verbs(directory)}
    return [figure for name in loaded for figure in _figures(name, samples, loaded[name])]


def _figures(name: str, samples: dict[str, Samples], loaded: list[str]) -> list[Figure]:
    ours, floors = samples[name], {floor: samples[floor] for floor in _FLOORS}
    detail = f"{len(ours)} calls, {ours}; " + "; ".join(f"`{floor}`: {times}" for floor, times in floors.items())
    return [
        Figure.below(f"`{name}`, median", ours.median, GOAL_S, "s", "the goal", detail),
        *(Figure.told(f"`{name}`, median", ours.median / t.median, "x", f"`{floor}`") for floor, t in floors.items()),
        Figure.exactly(f"`{name}`: heavy modules", len(loaded), 0, "modules", ", ".join(HEAVY), ", ".join(loaded[:5])),
    ]


def heavy_modules(asked: Asked, directory: Path) -> list[str]:
    """Which of HEAVY, or modules in them, the process and its children load, by Python's own account."""
    told = _call(asked, directory, {"PYTHONPROFILEIMPORTTIME": "1"})
    names = re.findall(r"^import time:.*\|\s+(\S+)$", told, re.MULTILINE)
    if not names:
        raise RunError("Python gave no account of what it imported")
    return [name for name in names if name.partition(".")[0] in HEAVY]


def furnish(directory: Path) -> None:
    """A place where a person works: a run of theirs and a model."""
    _write_model(directory / "model")
    RunDirectory.create(ProrlConfig(run=RunSettings(root=str(directory / "runs"))))


def _write_model(directory: Path) -> None:
    """All that a dry run looks at: tokenizer, configuration, and a file of weights that holds one number."""
    write_chat_model(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 8}))
    header = json.dumps({"one": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _call(asked: Asked, directory: Path, more: Mapping[str, str] | None = None) -> str:
    """What the process says on standard error. RunError if it fails."""
    environment = {**os.environ, "PRORL_HOME": str(directory / "home"), **(more or {})}
    if asked.bare:
        environment["PATH"] = str(directory / "nothing")
    done = subprocess.run(
        [sys.executable, *asked.words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RunError(f"{' '.join(asked.words)} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stderr
