"""A rollout service in a few lines: it samples from the weights that were published to it, with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from prorl_hpc.inference.streamed_weights import streamed_tensors
from prorl_hpc.messages.batch import (
    BatchProgress,
    BatchResult,
    BatchSpec,
    BatchState,
    GroupFilter,
    GroupOutcome,
    GroupResult,
    WhenFull,
)
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.status import RunStatus, ServerStatus
from prorl_hpc.messages.trajectory import Segment, Trajectory

LUCKY = range(40, 120)
"""Tokens that are rewarded."""


def rollout(
    rollout_id: str,
    reward: float | None = 1.0,
    *,
    prompt: list[int] | None = None,
    tokens: list[int] | None = None,
    logprobs: list[float] | None = None,
    truncated: bool = False,
    status: Status = Status.DONE,
) -> RolloutResult:
    """A result of one turn."""
    tokens = tokens or [7, 8, 9]
    logprobs = logprobs if logprobs is not None else [-1.0] * len(tokens)
    segments = [Segment(prompt or [1, 2, 3]), Segment(tokens, logprobs, True, 0)]
    group = rollout_id.rpartition(".")[0]
    return RolloutResult(rollout_id, group, 0, "toy", status, reward, trajectory=Trajectory(segments, [], truncated))


def batch_result(groups: list[GroupResult], state: BatchState = BatchState.DONE, batch_id: str = "b") -> BatchResult:
    count = {o: sum(g.outcome is o for g in groups) for o in GroupOutcome}
    progress = BatchProgress(
        batch_id,
        state,
        len(groups),
        count[GroupOutcome.ACCEPTED],
        count[GroupOutcome.UNIFORM],
        count[GroupOutcome.BROKEN],
        0,
        0,
        0,
        len(groups),
    )
    return BatchResult(progress, groups, 1.0)


class FakeRollouts:
    """Implements RolloutService; what was made of a batch is recorded in ``recorded``. ``gap`` is added to what the probe finds; ``on_wait`` runs in each wait_batch;
    ``uniform`` names batches in which no group is informative. A batch with ``when_full=carry`` carries one group on,
    sampled from the weights of its own step, and the next takes it over."""

    def __init__(
        self,
        model: Path,
        uniform: frozenset[str] = frozenset(),
        turn_tokens: int = 6,
        secret: Path | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.uniform, self.turn_tokens, self.secret = uniform, turn_tokens, secret
        self.gap = 0.0
        self.version = -1
        self.specs: dict[str, BatchSpec] = {}
        self.recorded: dict[str, BatchResult] = {}
        self.made: list[str] = []
        """Batches in the order in which they were sampled."""
        self.updates: list[WeightUpdate] = []
        self.on_wait: Callable[[str], None] = lambda batch_id: None
        self.hang = False
        self.paused, self.pauses = False, 0
        self._carried: GroupResult | None = None

    async def __aenter__(self) -> FakeRollouts:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        if self.specs.setdefault(spec.batch_id, spec) != spec:
            raise ServiceError("ordered before with other contents", code="batch_differs", status=409)
        if spec.batch_id in self.recorded:
            return self.recorded[spec.batch_id].progress
        return BatchProgress(spec.batch_id, BatchState.RUNNING, spec.groups_wanted, 0, 0, 0, 0, 0, 0, 0)

    async def wait_batch(self, batch_id: str) -> BatchResult:
        self.on_wait(batch_id)
        if self.hang:
            await asyncio.Event().wait()
        if batch_id not in self.recorded:
            self.recorded[batch_id] = self._make(self.specs[batch_id])
            self.made.append(batch_id)
        return self.recorded[batch_id]

    def _make(self, spec: BatchSpec) -> BatchResult:
        batch_id = spec.batch_id
        taken_over = [self._carried] if self._carried and spec.when_full is WhenFull.CARRY else []
        new = [self._group(spec, index) for index in range(spec.groups_wanted - len(taken_over))]
        groups = taken_over + new
        full = all(g.outcome is GroupOutcome.ACCEPTED for g in groups)
        result = batch_result(groups, BatchState.DONE if full else BatchState.EXHAUSTED, batch_id)
        if spec.when_full is WhenFull.CARRY:
            later = self._group(spec, len(new))
            self._carried = msgspec.structs.replace(later, carried_from=batch_id)
            groups.append(GroupResult(later.group_id, len(new), GroupOutcome.CARRIED, later.rollouts[:1]))
        progress = msgspec.structs.replace(
            result.progress, rows_used=len(groups) - len(taken_over), carried_in=len(taken_over)
        )
        return msgspec.structs.replace(result, progress=progress, groups=groups)

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        from safetensors.torch import load_file

        self.updates.append(update)
        self.version = update.version
        given = {name: tensor for path in update.paths for name, tensor in load_file(path).items()}
        if update.source is not None:
            assert self.secret is not None
            given |= streamed_tensors(update.source, self.secret)
        missing = self.model.load_state_dict(given, strict=False)
        assert not missing.unexpected_keys, missing
        assert update.probe is not None
        found = torch.tensor(self._score(update.probe.token_ids))
        gap = float((found - torch.tensor(update.probe.logprobs)).abs().max()) + self.gap
        return [WeightUpdated(update.version, "inference-0", 0.1, gap)]

    async def pause(self, holder: str, for_s: float) -> RunStatus:
        self.paused = True
        self.pauses += 1
        return await self.status()

    async def resume(self, holder: str) -> RunStatus:
        self.paused = False
        return await self.status()

    async def status(self) -> RunStatus:
        server = ServerStatus("inference-0", "here", "fake", "tiny", True, self.version, 0, 0, 0, 0, 0.0)
        return RunStatus("run", 0.0, 0.0, {}, [], [server], [], 0.0)

    def _group(self, spec: BatchSpec, index: int) -> GroupResult:
        prompt = [5 + int(spec.rows[index]["number"]) % 30, 6, 7, 8]
        draw = torch.Generator().manual_seed((spec.sampling.seed or 0) + 97 * index)
        group_id = f"{spec.batch_id}.g{index}"
        sampled = self._sample(spec, prompt, draw)
        rollouts = [self._rollout(spec, f"{group_id}.s{k}", prompt, *one) for k, one in enumerate(sampled)]
        outcome = GroupOutcome.ACCEPTED
        if spec.filter is GroupFilter.INFORMATIVE and (
            spec.batch_id in self.uniform or len({r.reward for r in rollouts}) == 1
        ):
            outcome = GroupOutcome.UNIFORM
        return GroupResult(group_id, index, outcome, rollouts)

    def _sample(self, spec: BatchSpec, prompt: list[int], draw: torch.Generator) -> list[tuple[list[int], list[float]]]:
        """Tokens and logprobs of each sample of a group."""
        ids = torch.tensor([prompt] * spec.group_size)
        logprobs = []
        with torch.no_grad():
            for _ in range(self.turn_tokens):
                distribution = (self.model(ids).logits[:, -1] / spec.sampling.temperature).log_softmax(-1)
                drawn = torch.multinomial(distribution.exp(), 1, generator=draw)
                logprobs.append(distribution.gather(-1, drawn))
                ids = torch.cat([ids, drawn], dim=1)
        return list(zip(ids[:, len(prompt) :].tolist(), torch.cat(logprobs, 1).tolist(), strict=True))

    def _rollout(
        self, spec: BatchSpec, rollout_id: str, prompt: list[int], tokens: list[int], logprobs: list[float]
    ) -> RolloutResult:
        reward = sum(t in LUCKY for t in tokens) / len(tokens)
        segments = [Segment(prompt), Segment(tokens, logprobs, True, self.version)]
        group = rollout_id.rpartition(".")[0]
        return RolloutResult(rollout_id, group, 0, spec.task, Status.DONE, reward, trajectory=Trajectory(segments))

    def _score(self, ids: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
