"""The policies of a run as a worker needs them: how their chats are written, within which bounds, and how they are
rewarded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from msgspec.structs import replace

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import Spent, TokenConversation
from prorl_hpc.config.policies import model_setting, models_of
from prorl_hpc.config.schema import ModelConfig, ProrlConfig, TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.tasks.protocol import LLM
from prorl_hpc.worker.rewards import PolicyReward

_GROUP_OF_BATCH = re.compile(r"\.g(\d+)\Z")
"""The number of a batch's group in its id, which core.groups gives: unlike the batch's name it is the same in every run."""


@dataclass(frozen=True)
class Policy:
    """How a policy's chats are written and bounded, and how it is rewarded."""

    chat: ChatFormat
    max_context_tokens: int
    max_turn_tokens: int
    max_rollout_tokens: int = 0
    stop: tuple[str, ...] = ()
    reward: PolicyReward | None = None
    """In place of the task's own."""

    def converse(self, spec: RolloutSpec, llm: LLM, spent: Spent, number: int = 0) -> TokenConversation:
        """The rollout's conversation, or its ``number``-th further one; all count their tokens in ``spent``."""
        # A row that a batch has twice is sampled anew.
        numbered = _GROUP_OF_BATCH.search(spec.group_id)
        scope = f"{spec.row.get('id', '')}/{numbered[1] if numbered else ''}/{spec.sample}"
        return TokenConversation(
            self.chat,
            llm,
            replace(spec.sampling, stop=[*spec.sampling.stop, *self.stop]),
            max_context_tokens=self.max_context_tokens,
            max_turn_tokens=self.max_turn_tokens,
            max_rollout_tokens=self.max_rollout_tokens,
            # Not the rollout's id, which differs between runs: a seeded run is repeatable.
            seed_scope=f"{scope}/{number}" if number else scope,
            spent=spent,
        )


def load_policies(config: ProrlConfig) -> dict[str, Policy]:
    """Each policy's chat format, bounds and reward; ConfigError if a model directory or a reward will not do."""
    rewards = {name: PolicyReward(name, policy.reward) for name, policy in config.policies.items() if policy.reward}
    return {
        name: _load_policy(name, model, config.task, rewards.get(name)) for name, model in models_of(config).items()
    }


def _load_policy(name: str, model: ModelConfig, task: TaskConfig, reward: PolicyReward | None) -> Policy:
    where = model_setting(name)
    if not model.path:
        raise ConfigError(f"{where}.path is empty: the worker needs the model's tokenizer and chat template")
    chat = ChatFormat.open(model.path, thinking=model.thinking, tool_format=model.tool_format)
    bounds = (model.max_context_tokens, task.max_turn_tokens, task.max_rollout_tokens, tuple(task.stop))
    return Policy(chat, *bounds, reward)
