"""All ranks of the trainer doing the same thing: rank 0 leads by broadcasting calls, the others follow.

Rank 0 alone talks to the rollout service. Every call below is collective; files are written by rank 0, and by
each rank for its own part of the optimizer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer import best_model, checkpoint
from prorl_hpc.trainer.batches import TrainingBatch
from prorl_hpc.trainer.best_model import BestModel
from prorl_hpc.trainer.checkpoint import Checkpoint, Position
from prorl_hpc.trainer.checkpoint_files import CheckpointNotWritten
from prorl_hpc.trainer.direct_copy import copies
from prorl_hpc.trainer.engine import Engine, StepOutcome, prepare_deepspeed
from prorl_hpc.trainer.process_group import join
from prorl_hpc.trainer.ranks import local_rank
from prorl_hpc.trainer.stopping import Stopped, StopSignal
from prorl_hpc.trainer.weights import write_safetensors

log = logging.getLogger(__name__)
T = TypeVar("T")


class Rank:
    """One rank: joins the group, loads the newest checkpoint or the model, then does what it is told."""

    def __init__(
        self, config: ProrlConfig, run: RunDirectory, stop: StopSignal, *, rank: int, world: int, host: str
    ) -> None:
        settings = config.trainer
        self._run_id = run.run_id
        self._settings, self._checkpoints, self._model = settings, run.checkpoints, Path(config.model.path)
        commands = join(
            run.state,
            rank=rank,
            world=world,
            local_rank=local_rank(rank, settings.ranks_per_node, os.environ),
            host=host,
            timeout_s=config.run.start_timeout_s,
        )
        prepare_deepspeed()
        newest = _chosen(run, rank, commands)
        source = newest.path if newest is not None else self._model
        self.engine = Engine(
            str(source),
            settings,
            stop,
            world=world,
            commands=commands,
            reference_path=settings.kl_model or config.model.path,
        )
        self.position = Position()
        self.saved_line: dict[str, Any] | None = None
        if newest is not None:
            checkpoint.restore(self.engine, newest)
            self.position, self.saved_line = newest.state.position, newest.state.line

    def train(self, batch: TrainingBatch, learning_rate: float) -> StepOutcome:
        return self.engine.train(batch, learning_rate)

    def score(self, token_ids: list[int]) -> list[float]:
        return self.engine.score(token_ids)

    def write_weights(self, directory: Path) -> list[Path]:
        return write_safetensors(self.engine.weights(), directory, "model", write=self.engine.rank == 0)[0]

    def copy_weights(self) -> list[tuple[str, Tensor]]:
        return copies(self.engine.weights(), keep=self.engine.rank == 0)

    def save(self, position: Position, line: dict[str, Any] | None = None) -> Path:
        keep, run_id = self._settings.keep_checkpoints, self._run_id
        return checkpoint.save(
            self.engine, self._checkpoints, self._model, position, run_id=run_id, keep=keep, line=line
        )

    def keep_best(self, best: BestModel) -> None:
        best_model.keep(self.engine, self._checkpoints, self._model, best)

    def better(self, new: BestModel) -> bool:
        """Whether the model is to be kept as the best, for the reward that it earned on held-out prompts."""
        return self._settings.keep_best and best_model.is_better(self._checkpoints, new)

    def close(self) -> None:
        dist.destroy_process_group()


class Crew:
    """Rank 0's side. Torch runs in one thread of its own, so that the event loop keeps its connections alive and
    hears signals."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._rank: Rank | None = None

    async def load(self, make: Callable[[], Rank]) -> Rank:
        self._rank = await self._in_thread(make)
        return self._rank

    async def train(self, batch: TrainingBatch, learning_rate: float) -> StepOutcome:
        return await self._all("train", batch, learning_rate)  # type: ignore[no-any-return]

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self._all("score", token_ids)  # type: ignore[no-any-return]

    async def write_weights(self, directory: Path) -> list[Path]:
        return await self._all("write_weights", directory)  # type: ignore[no-any-return]

    async def copy_weights(self) -> list[tuple[str, Tensor]]:
        return await self._all("copy_weights")  # type: ignore[no-any-return]

    async def save(self, position: Position, line: dict[str, Any] | None = None) -> Path:
        """``line``: SavedState's."""
        return await self._all("save", position, line)  # type: ignore[no-any-return]

    @property
    def saved_line(self) -> dict[str, Any] | None:
        """Of the checkpoint that training goes on from: SavedState's ``line``."""
        assert self._rank is not None, "load comes first"
        return self._rank.saved_line

    async def keep_best(self, new: BestModel) -> None:
        """The model has earned this reward on the held-out prompts: keep it if that is the best so far, and
        trainer.keep_best is set. A full disk is told and ends nothing."""
        assert self._rank is not None, "load comes first"
        if not self._rank.better(new):
            return
        try:
            await self._all("keep_best", new)
        except CheckpointNotWritten as error:
            log.error("the best model so far, of step %d, is not kept: %s", new.step, error)

    async def close(self) -> None:
        """Let the other ranks end too."""
        if self._rank is not None:
            await self._all("close")
        self._thread.shutdown()

    async def _all(self, name: str, *arguments: Any) -> Any:
        rank = self._rank
        assert rank is not None, "load comes first"

        def call() -> Any:
            if rank.engine.world > 1:
                dist.broadcast_object_list([name, arguments], src=0, group=rank.engine.commands)
            return getattr(rank, name)(*arguments)

        return await self._in_thread(call)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work))


def _chosen(run: RunDirectory, rank: int, commands: dist.ProcessGroup) -> Checkpoint | None:
    """Rank 0 looks which checkpoint is whole; all go on from the same one, or raise what it raises."""
    told: list[Any] = [None, None]
    if rank == 0:
        try:
            told[0] = checkpoint.choose(run.checkpoints, run.run_id)
        except RunError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0, group=commands)
    if told[1] is not None:
        raise RunError(told[1])
    return told[0]  # type: ignore[no-any-return]


def follow(rank: Rank) -> None:
    """The life of ranks 1 and up."""
    while True:
        call: list[Any] = [None, None]
        dist.broadcast_object_list(call, src=0, group=rank.engine.commands)
        name, arguments = call
        try:
            getattr(rank, name)(*arguments)
        except (Stopped, CheckpointNotWritten):
            continue  # all ranks raise it together; rank 0 says what comes next
        if name == "close":
            return
