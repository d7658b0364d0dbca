"""Tokens per second of an optimizer step, and the memory that it takes, of our trainer and of TRL's GRPOTrainer."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.peer_environment import trl_environment
from prorl_hpc.bench.processes import Processes
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.bench.trainer_batch import BatchSize, FixedBatch, vocabulary_of
from prorl_hpc.bench.trainer_steps import LEARNING_RATE, WARM_UP_SHARE, Asked, Taken
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.__main__ import ENVIRONMENT

T = TypeVar("T")
OURS, ROW_BY_ROW, TRL = "ours", "ours, share_prompts=false", "TRL"
_LIMIT_S = 3600.0
_MODEL = "smollm2-135m"
_ROWS = 4
"""Of TRL's micro-batches. Ours may hold as many padded tokens."""
_SAME_GRADIENT = 0.01
"""TRL adds 1e-4 to the standard deviation of a group's rewards, which ours does not."""
_ENVIRONMENT = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
"""Both sides compute on the CPU, wherever the bench runs."""
_SCRIPT = Path(__file__).parent / "peers" / "trl_steps.py"


@dataclass(frozen=True)
class StepPlan:
    """``turns`` processes of each side, one after the other, each with ``steps`` timed steps after one to warm up."""

    size: BatchSize
    turns: int
    steps: int
    model: str = _MODEL


FULL = StepPlan(BatchSize(4, 8, (100, 150), (50, 150)), turns=3, steps=1)
QUICK = StepPlan(BatchSize(2, 4, (50, 75), (25, 75)), turns=1, steps=2)


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError without the model, without torch, or if TRL cannot be installed."""
    plan = QUICK if quick else FULL
    python = trl_environment(say) / "bin" / "python"
    with scratch_directory() as directory, Processes(directory) as processes:
        bench = StepBench(plan, directory, processes)
        say("the model's logprobs of the batch")
        bench.score()
        found: dict[str, list[Taken]] = {OURS: [], ROW_BY_ROW: [], TRL: []}
        for turn in range(plan.turns):
            for name in found:
                taken = bench.trl(python) if name == TRL else bench.ours(share_prompts=name == OURS)
                found[name].append(taken)
                seconds = ", ".join(f"{s:.2f}" for s in taken.seconds)
                say(f"turn {turn + 1}: {name}: {seconds} s a step, {taken.peak_mib:.0f} MiB")
        return figures(plan, bench.batch, found)


class StepBench:
    """``directory`` gets the batch and what the processes answer."""

    def __init__(self, plan: StepPlan, directory: Path, processes: Processes) -> None:
        self._plan, self._directory, self._processes = plan, directory, processes
        self._model = small_model(plan.model)
        self.batch = FixedBatch.draw(plan.size, vocabulary_of(self._model))
        self._write_batch()

    def score(self) -> None:
        """Give the batch the model's own logprobs."""
        self.batch = self._ours(self._asked(score=True), FixedBatch)
        self._write_batch()

    def ours(self, *, share_prompts: bool) -> Taken:
        return self._ours(self._asked(share_prompts=share_prompts), Taken)

    def trl(self, python: Path) -> Taken:
        words = ["--rows", _ROWS, "--learning-rate", LEARNING_RATE, "--warm-up-share", WARM_UP_SHARE]
        return self._run([str(python), "-W", "ignore", str(_SCRIPT), *map(str, words)], self._asked(), Taken)

    def _write_batch(self) -> None:
        write_json(self._directory / "batch.json", self.batch)

    def _asked(self, *, share_prompts: bool = True, score: bool = False) -> Asked:
        work = self._directory / "work"
        work.mkdir(exist_ok=True)
        return Asked(
            directory=str(work),
            model=str(self._model),
            batch=str(self._directory / "batch.json"),
            steps=self._plan.steps,
            micro_batch_tokens=_ROWS * self.batch.padded_length,
            threads=threads(),
            share_prompts=share_prompts,
            score=score,
        )

    def _ours(self, asked: Asked, answer: type[T]) -> T:
        return self._run([sys.executable, "-m", "prorl_hpc.bench.trainer_steps"], asked, answer)

    def _run(self, command: Sequence[str], asked: Asked, answer: type[T]) -> T:
        """RunError if the process fails."""
        asked_file, out = self._directory / "asked.json", self._directory / "out.json"
        write_json(asked_file, asked)
        self._processes.start("steps", [*command, "--asked", str(asked_file), "--out", str(out)], _ENVIRONMENT)
        if (code := self._processes.wait("steps", _LIMIT_S)) != 0:
            raise RunError(f"{command[-1]} ended with exit code {code}:\n{self._processes.tail('steps')}")
        return msgspec.json.decode(out.read_bytes(), type=answer)


def threads() -> int:
    return len(os.sched_getaffinity(0))


def figures(plan: StepPlan, batch: FixedBatch, found: Mapping[str, Sequence[Taken]]) -> list[Figure]:
    """Medians over all timed steps."""
    pace = {name: batch.tokens / statistics.median(_seconds(taken)) for name, taken in found.items()}
    peak = {name: statistics.median(one.peak_mib for one in taken) for name, taken in found.items()}
    against = found[TRL][0].software
    how = (
        f"{plan.model}, {plan.size.groups} groups of {plan.size.samples}: {batch.tokens} tokens, {batch.trained_tokens} of them "
        f"trained, padding not counted; float32, {threads()} threads, micro-batches of at most {_ROWS * batch.padded_length} "
        f"padded tokens, no gradient checkpointing; medians of {len(_seconds(found[OURS]))} steps: "
        + ", ".join(f"{name} {value:.4g} tokens/s" for name, value in pace.items())
    )
    memory = ", ".join(f"{name} {value:.0f} MiB" for name, value in peak.items())
    norms = ", ".join(f"{name} {taken[0].grad_norms[0]:.6g}" for name, taken in found.items())
    return [
        Figure.at_least("step: tokens/s", pace[OURS] / pace[TRL], 1.0, "x", against, how),
        Figure.told("step: tokens/s with share_prompts=false", pace[ROW_BY_ROW] / pace[TRL], "x", against),
        Figure.below("step: peak memory", peak[OURS] / peak[TRL], 1.0, "x", against, f"whole processes: {memory}"),
        Figure.told(
            "step: peak memory with share_prompts=false", peak[ROW_BY_ROW] / peak[TRL], "x", against, "whole processes"
        ),
        Figure.at_most(
            "step: gradient norm differs by",
            100 * _spread([taken[0].grad_norms[0] for taken in found.values()]),
            100 * _SAME_GRADIENT,
            "%",
            against,
            f"the sides do the same work: {norms}; TRL adds 1e-4 to the standard deviation of rewards",
        ),
    ]


def _seconds(taken: Sequence[Taken]) -> list[float]:
    return [seconds for one in taken for seconds in one.seconds]


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / min(values)
