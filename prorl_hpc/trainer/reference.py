"""The frozen model that the KL term holds the policy to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.trainer.deepspeed_settings import zero_section
from prorl_hpc.trainer.layout import MicroBatch
from prorl_hpc.trainer.policy import Policy, load_policy


class Reference:
    """π_ref. Whole on every rank; with ZeRO-3 in parts, as the policy is. Collective in that case."""

    def __init__(self, path: str, config: TrainerConfig, policy: Policy, device: torch.device) -> None:
        self._temperature = config.temperature
        model = load_policy(path, policy.lm.dtype)
        known, own = (m.lm.config.get_text_config().vocab_size for m in (policy, model))
        if known != own:
            raise ConfigError(
                f"the reference model {path} (trainer.kl_model) knows {own} tokens, the trained model {known}: a KL divergence needs one "
                "vocabulary. Give a model of the same family, or leave trainer.kl_model empty"
            )
        model.requires_grad_(False)
        model.eval()
        model.to(device)
        model.check_against_model()
        self.shares_prompts = model.shares_prompts
        self._model: nn.Module = _in_parts(model, config) if config.zero_stage == 3 else model

    def logprobs(self, micro: MicroBatch, chunks: int) -> Tensor:
        """log π_ref of the trained tokens, float32 [N], at the temperature of training."""
        with torch.no_grad():
            logprobs: Tensor = self._model(*micro.inputs, self._temperature, chunks)[0]
        return logprobs


def _in_parts(model: Policy, config: TrainerConfig) -> nn.Module:
    import deepspeed

    zero = zero_section(config)
    zero.pop("offload_optimizer", None)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": model.lm.dtype == torch.bfloat16},
        "steps_per_print": 1_000_000_000,
    }
    engine: nn.Module = deepspeed.initialize(model=model, config=settings, dist_init_required=False)[0]
    engine.eval()
    return engine
