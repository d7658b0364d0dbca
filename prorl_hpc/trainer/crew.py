"""All ranks of the trainer doing the same thing: rank 0 leads by broadcasting calls, the others follow.

Rank 0 alone talks to the rollout service. Every call below is collective; files are written by rank 0, and by
each rank for its own part of the optimizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.trainer import checkpoint
from prorl_hpc.trainer.batches import TrainingBatch
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.engine import Engine, StepOutcome, prepare_deepspeed
from prorl_hpc.trainer.process_group import join
from prorl_hpc.trainer.stopping import Stopped, StopSignal
from prorl_hpc.trainer.weights import write_safetensors

T = TypeVar("T")


class Rank:
    """One rank: joins the group, loads the newest checkpoint or the model, then does what it is told."""

    def __init__(
        self, config: ProrlConfig, run: RunDirectory, stop: StopSignal, *, rank: int, world: int, host: str
    ) -> None:
        settings = config.trainer
        self._settings, self._checkpoints, self._model = settings, run.checkpoints, Path(config.model.path)
        commands = join(
            run.state,
            rank=rank,
            world=world,
            local_rank=rank % settings.ranks_per_node,
            host=host,
            timeout_s=config.run.start_timeout_s,
        )
        prepare_deepspeed()
        newest = checkpoint.latest(run.checkpoints)
        source = newest.path if newest is not None else self._model
        self.engine = Engine(str(source), settings, stop, world=world, commands=commands)
        self.position = Position()
        if newest is not None:
            checkpoint.restore(self.engine, newest)
            self.position = newest.state.position

    def train(self, batch: TrainingBatch, learning_rate: float) -> StepOutcome:
        return self.engine.train(batch, learning_rate)

    def score(self, token_ids: list[int]) -> list[float]:
        return self.engine.score(token_ids)

    def write_weights(self, directory: Path) -> list[Path]:
        return write_safetensors(self.engine.weights(), directory, "model", write=self.engine.rank == 0)[0]

    def save(self, position: Position) -> Path:
        return checkpoint.save(self.engine, self._checkpoints, self._model, position, self._settings.keep_checkpoints)

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

    async def save(self, position: Position) -> Path:
        return await self._all("save", position)  # type: ignore[no-any-return]

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


def follow(rank: Rank) -> None:
    """The life of ranks 1 and up."""
    while True:
        call: list[Any] = [None, None]
        dist.broadcast_object_list(call, src=0, group=rank.engine.commands)
        name, arguments = call
        try:
            getattr(rank, name)(*arguments)
        except Stopped:
            continue  # all ranks raise it together; rank 0 says what comes next
        if name == "close":
            return
