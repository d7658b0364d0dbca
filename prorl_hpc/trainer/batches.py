"""From what the rollout service answers to what the loss needs, and nothing untrainable in between.

A rollout that did not end DONE is left out of its group's mean and std. Missing logprobs and rewards that
are not numbers are errors that name the rollout: never zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.batch import BatchResult, GroupOutcome, GroupResult
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.trajectory import Finish, Trajectory
from prorl_hpc.trainer.advantages import GROUP_ADVANTAGES, batch_advantages, soft_overlong_punishment
from prorl_hpc.trainer.losses import sequence_weights

ZERO_LOGPROBS_SUSPECT = 8
"""So many trained tokens with a logprob of exactly 0.0, and no other: a server or router padded them."""


@dataclass(frozen=True)
class Sample:
    """One conversation: ids, where the loss counts, the engine's logprobs and one advantage. Lists of length T."""

    rollout_id: str
    group_id: str
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantage: float
    """0.0 with ``advantage=gae``: the engine computes one for each token."""
    part: int = 0
    """0 for a rollout's main conversation, then its branches, which have its reward and its advantage."""
    reward: float = 0.0
    """The rollout's, soft overlong punishment included."""
    weight: float = 0.0
    """Of each trained token in the loss of the batch, see ``losses.sequence_weights``."""
    oldest_version: int = 0
    """Least weight version of its trained tokens; where nobody said, they count as new enough."""

    @property
    def first_trained(self) -> int:
        """Index of the first token that counts."""
        return self.loss_mask.index(True)

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class LeftOut:
    """A sample whose tokens have no gradient and are not computed; in the batch's denominators they count."""

    group_id: str
    trained_tokens: int


@dataclass(frozen=True)
class TrainingBatch:
    """``samples`` to be computed, and ``total_tokens`` trained tokens of the whole batch, those ``left_out`` included.
    ``stale_groups``: groups that are not in the batch because they are too old."""

    samples: list[Sample]
    total_tokens: int
    left_out: list[LeftOut] = field(default_factory=list)
    stale_groups: int = 0

    @classmethod
    def of(
        cls, samples: Sequence[Sample], settings: TrainerConfig, left_out: Sequence[LeftOut] = (), stale_groups: int = 0
    ) -> TrainingBatch:
        """A batch of these samples, their weights made for it."""
        lengths = [s.trained_tokens for s in samples] + [s.trained_tokens for s in left_out]
        weights = sequence_weights(lengths, settings.aggregation, settings.aggregation_tokens)
        weighed = [replace(sample, weight=weight) for sample, weight in zip(samples, weights, strict=False)]
        return cls(weighed, sum(lengths), list(left_out), stale_groups)

    def mini_batches(self, n: int, settings: TrainerConfig) -> list[TrainingBatch]:
        """Whole groups dealt out in turn to ``n`` parts (fewer if there are fewer groups), each with weights of its own. Parts
        in which nothing is to be computed are left out."""
        groups = list(dict.fromkeys([s.group_id for s in self.samples] + [s.group_id for s in self.left_out]))
        count = max(1, min(n, len(groups)))
        place = {group: i % count for i, group in enumerate(groups)}
        parts = [
            TrainingBatch.of(
                [s for s in self.samples if place[s.group_id] == i],
                settings,
                [s for s in self.left_out if place[s.group_id] == i],
            )
            for i in range(count)
        ]
        return [part for part in parts if part.samples]


def training_batch(result: BatchResult, config: TrainerConfig, oldest_allowed: int = 0) -> TrainingBatch:
    """Samples of the accepted groups: each conversation of a rollout with tokens of the policy is one. Groups with a trained token of
    a weight version below ``oldest_allowed`` are left out and counted; where nobody says versions, only synchronous training goes, which
    orders a batch when its weights are served and publishes none until it is made. Groups come in the order of their rows, whichever
    ended first. Raises RunError naming the rollout that cannot be trained on."""
    accepted = sorted(
        (group for group in result.groups if group.outcome is GroupOutcome.ACCEPTED),
        key=lambda group: (group.carried_from == "", group.carried_from, group.row_index),
    )
    candidates = [_candidates(group, config, oldest_allowed) for group in accepted]
    fresh = [group for group in candidates if all(s.oldest_version >= oldest_allowed for s in group.samples)]
    samples = _with_advantages(fresh, config)
    # Without KL, entropy and value loss an advantage of 0 leaves no gradient.
    others = config.advantage == "gae" or config.kl_coefficient or config.entropy_coefficient
    computed = [s for s in samples if others or s.advantage != 0.0]
    left_out = [LeftOut(s.group_id, s.trained_tokens) for s in samples if not others and s.advantage == 0.0]
    return TrainingBatch.of(computed, config, left_out, len(candidates) - len(fresh))


def check_vocabulary(batch: TrainingBatch, vocab_size: int) -> None:
    """RunError naming the rollout if one has a token id of ``vocab_size`` or more."""
    for sample in batch.samples:
        if (worst := max(sample.token_ids)) >= vocab_size:
            raise RunError(
                f"rollout {sample.rollout_id} has token id {worst}, the model that is trained knows 0 to {vocab_size - 1}: its "
                "vocabulary is not that of the tokenizer or of the LLM server. Use the tokenizer that belongs to model.path"
            )


@dataclass(frozen=True)
class _Candidates:
    """A group's rewards by rollout, those of filtered rollouts too, and its samples without advantages."""

    rewards: dict[str, float]
    samples: list[Sample]

    def lengths(self) -> list[int]:
        """Trained tokens of each rollout that are left after filtering."""
        return [sum(s.trained_tokens for s in self.samples if s.rollout_id == rollout) for rollout in self.rewards]


def _candidates(group: GroupResult, config: TrainerConfig, oldest_allowed: int) -> _Candidates:
    found = _Candidates({}, [])
    for rollout in group.rollouts:
        if rollout.status is not Status.DONE:
            continue
        found.rewards[rollout.rollout_id] = _reward(rollout, config)
        if not any(conversation.num_trained_tokens for conversation in rollout.trajectory.conversations):
            raise RunError(f"{_name(rollout)} has no token with logprobs from the policy: it cannot be trained on")
        for part, conversation in enumerate(rollout.trajectory.conversations):
            if not conversation.num_trained_tokens:
                continue
            _check_tokens(conversation, _name(rollout, part))
            unsaid = any(s.trained and s.weight_version is None for s in conversation.segments)
            if unsaid and config.staleness > 0 and oldest_allowed > 0:
                raise RunError(
                    f"{_name(rollout, part)} has tokens without a weight version: how old they are cannot be told. Train "
                    "with trainer.staleness=0, or on servers that say their version"
                )
            if config.overlong_filtering and _was_cut(conversation, config):
                continue  # DAPO §3.4: its reward stays in the group's mean, its tokens get loss mask 0
            found.samples.append(
                _sample(rollout, group.group_id, conversation, part, found.rewards[rollout.rollout_id], oldest_allowed)
            )
    return found


def _sample(
    rollout: RolloutResult, group_id: str, conversation: Trajectory, part: int, reward: float, version_unsaid: int
) -> Sample:
    versions = [s.weight_version for s in conversation.segments if s.trained and s.weight_version is not None]
    return Sample(
        rollout.rollout_id,
        group_id,
        conversation.token_ids,
        conversation.loss_mask,
        conversation.logprobs,
        advantage=0.0,
        part=part,
        reward=reward,
        oldest_version=min(versions, default=version_unsaid),
    )


def _with_advantages(groups: Sequence[_Candidates], config: TrainerConfig) -> list[Sample]:
    if config.advantage == "gae":
        return [sample for group in groups for sample in group.samples]
    rewards = [torch.tensor(list(group.rewards.values()), dtype=torch.float64) for group in groups]
    found: list[Tensor]
    if config.advantage == "batch":
        found = batch_advantages(rewards, [group.lengths() for group in groups])
    elif config.advantage in GROUP_ADVANTAGES:
        found = [GROUP_ADVANTAGES[config.advantage](each) for each in rewards]
    else:
        raise ConfigError(f"trainer.advantage={config.advantage}: choose {', '.join(GROUP_ADVANTAGES)}, batch or gae")
    samples = []
    for group, advantages in zip(groups, found, strict=True):
        by_rollout = dict(zip(group.rewards, advantages.tolist(), strict=True))
        samples += [replace(sample, advantage=by_rollout[sample.rollout_id]) for sample in group.samples]
    return samples


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
