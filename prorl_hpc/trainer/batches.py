"""From what the rollout service answers to what the loss needs, and nothing untrainable in between.

A rollout that did not end DONE is left out of its group's mean and std. Missing logprobs and rewards that
are not numbers are errors that name the rollout: never zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.batch import BatchResult, GroupOutcome, GroupResult
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.trajectory import Finish, Trajectory
from prorl_hpc.trainer.losses import group_advantages, soft_overlong_punishment

ZERO_LOGPROBS_SUSPECT = 8
"""So many trained tokens with a logprob of exactly 0.0, and no other: a server or router padded them."""


@dataclass(frozen=True)
class Sample:
    """One conversation: ids, where the loss counts, the engine's logprobs (π_old) and one advantage. Lists of length T.
    ``part``: 0 for a rollout's main conversation, then its branches, which have its advantage."""

    rollout_id: str
    group_id: str
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantage: float
    part: int = 0

    @property
    def first_trained(self) -> int:
        """Index of the first token that counts."""
        return self.loss_mask.index(True)

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class TrainingBatch:
    """``samples`` with a gradient, and ``total_tokens`` trained tokens of the whole batch: tokens of samples whose
    advantage is 0 add nothing to the gradient, so they are not computed, but they do count in the mean."""

    samples: list[Sample]
    total_tokens: int


def training_batch(result: BatchResult, config: TrainerConfig) -> TrainingBatch:
    """Samples of the accepted groups: each conversation of a rollout with tokens of the policy is one. Raises RunError naming
    the rollout that cannot be trained on."""
    samples = [
        sample
        for group in result.groups
        if group.outcome is GroupOutcome.ACCEPTED
        for sample in _group_samples(group, config)
    ]
    return TrainingBatch([s for s in samples if s.advantage != 0.0], sum(s.trained_tokens for s in samples))


def check_vocabulary(batch: TrainingBatch, vocab_size: int) -> None:
    """RunError naming the rollout if one has a token id of ``vocab_size`` or more."""
    for sample in batch.samples:
        if (worst := max(sample.token_ids)) >= vocab_size:
            raise RunError(
                f"rollout {sample.rollout_id} has token id {worst}, the model that is trained knows 0 to {vocab_size - 1}: its "
                "vocabulary is not that of the tokenizer or of the LLM server. Use the tokenizer that belongs to model.path"
            )


def _group_samples(group: GroupResult, config: TrainerConfig) -> list[Sample]:
    finished = [r for r in group.rollouts if r.status is Status.DONE]
    rewards = [_reward(r, config) for r in finished]
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist() if finished else []
    samples = []
    for rollout, advantage in zip(finished, advantages, strict=True):
        if not any(conversation.num_trained_tokens for conversation in rollout.trajectory.conversations):
            raise RunError(f"{_name(rollout)} has no token with logprobs from the policy: it cannot be trained on")
        for part, conversation in enumerate(rollout.trajectory.conversations):
            if not conversation.num_trained_tokens:
                continue
            _check_tokens(conversation, _name(rollout, part))
            if config.overlong_filtering and _was_cut(conversation, config):
                continue  # DAPO §3.4: its reward stays in the group's mean, its tokens get loss mask 0
            samples.append(_sample(rollout, group.group_id, conversation, advantage, part))
    return samples


def _sample(rollout: RolloutResult, group_id: str, conversation: Trajectory, advantage: float, part: int) -> Sample:
    ids, mask, logprobs = conversation.token_ids, conversation.loss_mask, conversation.logprobs
    return Sample(rollout.rollout_id, group_id, ids, mask, logprobs, advantage, part)


def _was_cut(conversation: Trajectory, config: TrainerConfig) -> bool:
    """A service that says no reason may still say that a turn was cut."""
    if conversation.finish is Finish.UNKNOWN:
        return conversation.truncated
    return conversation.finish in config.overlong_finishes


def _name(rollout: RolloutResult, part: int = 0) -> str:
    branch = f", branch {part}," if part else ""
    return f"rollout {rollout.rollout_id}{branch} from server {rollout.server or 'unknown'}"


def _reward(rollout: RolloutResult, config: TrainerConfig) -> float:
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise RunError(
            f"rollout {rollout.rollout_id} (task {rollout.task}, worker {rollout.worker or 'unknown'}) ended DONE with "
            f"reward {rollout.reward}: a reward must be a finite number. Mend the task's eval"
        )
    length = sum(conversation.num_trained_tokens for conversation in rollout.trajectory.conversations)
    return rollout.reward + soft_overlong_punishment(
        length, config.max_response_tokens, config.soft_overlong_cache_tokens
    )


def _check_tokens(conversation: Trajectory, where: str) -> None:
    """Every generated token needs the logprob that its engine sampled it with."""
    logprobs: list[float] = []
    for segment in (s for s in conversation.segments if s.trained):
        if segment.logprobs is None or len(segment.logprobs) != len(segment.token_ids):
            got = "no logprobs" if segment.logprobs is None else f"{len(segment.logprobs)} logprobs"
            raise RunError(f"{where} has {got} for {len(segment.token_ids)} generated tokens: it cannot be trained on")
        logprobs += segment.logprobs
    if conversation.loss_mask[0]:
        raise RunError(f"{where} begins with a generated token: nothing predicts it, a prompt must come first")
    bad = next((x for x in logprobs if not math.isfinite(x) or x > 1e-3), None)
    if bad is not None:
        raise RunError(f"{where} has a logprob of {bad}: logprobs are finite and not above 0")
    if len(logprobs) >= ZERO_LOGPROBS_SUSPECT and not any(logprobs):
        raise RunError(
            f"{where} has only zeros for the logprobs of its {len(logprobs)} generated tokens: something between the engine "
            "and here pads them. Ask the server for processed logprobs"
        )
