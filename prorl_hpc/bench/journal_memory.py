"""How far finished rollouts grow the memory of the process that keeps the journal, and its file."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import msgspec
import psutil

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec, Status
from prorl_hpc.messages.trajectory import Message, Segment, Trajectory
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.rollout.journal import Journal

_BATCH_ROLLOUTS = 256
_GROUP_ROLLOUTS = 16
_SINGLES = 64
_IN_FLIGHT = 64
_WAITING = 4096
_VARIANTS = 8
_MIB = 1 << 20


def measure(directory: Path, rollouts: int, tokens: int) -> dict[str, float]:
    """Record ``rollouts`` finished rollouts of ``tokens`` tokens, most in batches and some by themselves, into a
    journal in the empty ``directory``, as fast as they get into Parquet (a few thousand may wait for it). The figures are this process's, so give it one of its own:
    ``rss_before_mib``, ``rss_after_mib``, ``rss_peak_mib``, ``journal_peak_mib`` and ``journal_mib`` (with its
    write-ahead log), ``parquet_mib``, ``seconds``."""
    return asyncio.run(_Measuring(directory, tokens).run(rollouts))


class _Measuring:
    def __init__(self, directory: Path, tokens: int) -> None:
        self._file = directory / "journal.sqlite"
        self._run = RunDirectory(directory)
        self._trajectories = [_trajectory(seed, tokens) for seed in range(_VARIANTS)]
        self._process = psutil.Process(os.getpid())
        self._journal: Journal
        self._rss_peak = self._journal_peak = 0
        self._recorded = 0

    async def run(self, rollouts: int) -> dict[str, float]:
        self._journal = await Journal.open(self._file, epoch="measured", store=RolloutStore(self._run))
        before = self._process.memory_info().rss
        began = time.perf_counter()
        while self._recorded < rollouts:
            await self._batch(min(_BATCH_ROLLOUTS, rollouts - self._recorded))
            await self._singles(min(_SINGLES, rollouts - self._recorded))
            while (await self._journal.waiting())[0] > _WAITING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await self._journal.close()
        self._sample()
        return {
            "rss_before_mib": before / _MIB,
            "rss_after_mib": self._process.memory_info().rss / _MIB,
            "rss_peak_mib": self._rss_peak / _MIB,
            "journal_peak_mib": self._journal_peak / _MIB,
            "journal_mib": self._journal_size() / _MIB,
            "parquet_mib": sum(path.stat().st_size for path in self._run.rollouts.glob("*.parquet")) / _MIB,
            "seconds": time.perf_counter() - began,
        }

    async def _batch(self, count: int) -> None:
        name = f"batch-{self._recorded}"
        rows = [{"id": str(row)} for row in range(-(-count // _GROUP_ROLLOUTS))]
        await self._journal.accept_batch(BatchSpec(name, "noop", rows, len(rows), _GROUP_ROLLOUTS))
        groups: list[GroupResult] = []
        for row in range(len(rows)):
            group = f"{name}.g{row}"
            size = min(_GROUP_ROLLOUTS, count - row * _GROUP_ROLLOUTS)
            results = [_result(f"{group}.s{sample}", group, sample) for sample in range(size)]
            groups.append(GroupResult(group, row, GroupOutcome.ACCEPTED, results))
        await self._record([rollout for group in groups for rollout in group.rollouts], name)
        n = len(groups)
        progress = BatchProgress(name, BatchState.DONE, n, n, 0, 0, 0, count, 0, n)
        await self._journal.finish_batch(BatchResult(progress, groups, 1.0), keeps_open=False)

    async def _singles(self, count: int) -> None:
        names = [f"single-{self._recorded + i}" for i in range(count)]
        await self._journal.accept_rollouts([RolloutSpec(name, "noop", {}) for name in names])
        await self._record([_result(name, "", 0) for name in names], "")

    async def _record(self, results: list[RolloutResult], batch_id: str) -> None:
        for start in range(0, len(results), _IN_FLIGHT):
            futures = []
            for result in results[start : start + _IN_FLIGHT]:
                # A copy of its own for each, as if it had just come in.
                trajectory = bytes(bytearray(self._trajectories[self._recorded % _VARIANTS]))
                futures.append(self._journal.record(result, trajectory, batch_id))
                self._recorded += 1
            await asyncio.gather(*futures)
            self._sample()

    def _sample(self) -> None:
        self._rss_peak = max(self._rss_peak, self._process.memory_info().rss)
        self._journal_peak = max(self._journal_peak, self._journal_size())

    def _journal_size(self) -> int:
        files = (self._file, self._file.with_name(f"{self._file.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())


def _trajectory(seed: int, tokens: int) -> bytes:
    """A quarter of the tokens are the prompt's."""
    drawn = random.Random(seed)
    ids = [drawn.randrange(50_000) for _ in range(tokens)]
    logprobs = [-drawn.random() for _ in range(tokens - tokens // 4)]
    segments = [Segment(ids[: tokens // 4]), Segment(ids[tokens // 4 :], logprobs, trained=True, weight_version=1)]
    return msgspec.msgpack.encode(Trajectory(segments, [Message("assistant", "word " * (tokens // 2))]))


def _result(name: str, group: str, sample: int) -> RolloutResult:
    return RolloutResult(name, group, sample, "noop", Status.DONE, reward=1.0, worker="worker-0", server="inference-0")
