"""``python -m prorl_hpc.bench.trainer_steps --asked FILE --out FILE``: optimizer steps of our trainer on a fixed batch, timed.

One rank as a run has it, without a run: no service, no engine. ``score`` instead of steps: the batch with the model's
logprobs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from prorl_hpc.bench.trainer_batch import FixedBatch
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ModelConfig, ProrlConfig, RunSettings, TrainerConfig
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.__main__ import ENVIRONMENT

if TYPE_CHECKING:
    from prorl_hpc.trainer.crew import Rank

_MIB_KIB = 1024
WARM_UP_SHARE = 8
"""The first step, which is not timed, has completions of one part in so many."""


class Asked(msgspec.Struct, frozen=True):
    """``directory``: an empty one for the run directory that a rank wants."""

    directory: str
    model: str
    batch: str
    steps: int
    micro_batch_tokens: int
    threads: int
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    score: bool = False


class Taken(msgspec.Struct, frozen=True):
    """``seconds`` and ``grad_norms`` of each timed step; ``peak_mib``: the most memory that the process ever had."""

    seconds: list[float]
    grad_norms: list[float]
    peak_mib: float
    software: str


def trainer_config(asked: Asked) -> TrainerConfig:
    """DAPO in float32 on one rank, which has nobody to share optimizer state with: ZeRO stage 0."""
    return TrainerConfig(
        dtype="float32",
        zero_stage=0,
        threads=asked.threads,
        micro_batch_tokens=asked.micro_batch_tokens,
        share_prompts=asked.share_prompts,
        gradient_checkpointing=asked.gradient_checkpointing,
        learning_rate=LEARNING_RATE,
        overlong_filtering=False,
    )


LEARNING_RATE = 1e-7
"""So small that every step has the first one's gradient."""


def peak_mib() -> float:
    """VmHWM of this process. RunError where the system does not tell it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / _MIB_KIB
    raise RunError("/proc/self/status has no VmHWM")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--asked", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    asked = read_json(args.asked, Asked)
    if asked is None:
        raise RunError(f"there is no {args.asked}")
    batch = msgspec.json.decode(Path(asked.batch).read_bytes(), type=FixedBatch)
    write_json(args.out, _scored(asked, batch) if asked.score else _timed(asked, batch))
    return 0


def _timed(asked: Asked, fixed: FixedBatch) -> Taken:
    from prorl_hpc.trainer.batches import training_batch

    rank, config = _rank(asked), trainer_config(asked)
    rank.train(training_batch(fixed.shortened(WARM_UP_SHARE).as_result(), config), LEARNING_RATE)
    result, seconds, norms = fixed.as_result(), [], []
    for _ in range(asked.steps):
        began = time.perf_counter()
        outcome = rank.train(training_batch(result, config), LEARNING_RATE)
        seconds.append(time.perf_counter() - began)
        norms.append(float(outcome.metrics["grad_norm"]))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))
    return Taken(seconds, norms, peak_mib(), versions)


def _scored(asked: Asked, fixed: FixedBatch) -> FixedBatch:
    rank = _rank(asked)
    groups = zip(fixed.prompts, fixed.completions, strict=True)
    scores = [[rank.score(prompt + c)[len(prompt) - 1 :] for c in group] for prompt, group in groups]
    return fixed.with_logprobs(scores)


def _rank(asked: Asked) -> Rank:
    from prorl_hpc.trainer.crew import Rank
    from prorl_hpc.trainer.stopping import StopSignal

    config = ProrlConfig(
        run=RunSettings(name="bench", root=asked.directory, runtime_root=asked.directory),
        model=ModelConfig(name="bench", path=asked.model),
        trainer=trainer_config(asked),
    )
    return Rank(config, RunDirectory.create(config), StopSignal(), rank=0, world=1, host="127.0.0.1")


if __name__ == "__main__":
    raise SystemExit(main())
