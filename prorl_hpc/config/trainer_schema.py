"""Group ``trainer`` of the configuration, as ``config.schema`` has the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainerConfig:
    """Group ``trainer``: DAPO and its kin on DeepSpeed."""

    enabled: bool = True
    """False: the rollout service alone, for a trainer of your own."""
    steps: int = 16
    groups_per_step: int = 4
    group_size: int = 8
    max_rows_per_step: int = 32
    """Supply of prompts that dynamic sampling may use up for one step."""
    max_parallel_groups: int = 0
    """Groups in flight at once; 0: groups_per_step."""
    dynamic_sampling: bool = True
    when_full: str = "cancel"
    """What becomes of groups in flight when a step has its groups: cancel, or carry: they go on into the next step, which needs
    ``max_parallel_groups`` greater than ``groups_per_step``, and takes one of the versions of ``staleness``: of k, k − 1 batches
    are made ahead."""
    temperature: float = 1.0
    top_p: float = 1.0
    learning_rate: float = 3.0e-5
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    advantage: str = "group"
    """How rewards become advantages: group (GRPO, DAPO: over mean and std of the prompt's samples), group_mean (Dr. GRPO: the
    mean alone), leave_one_out (RLOO), batch (REINFORCE++ with baseline: group mean, then whitened over the batch), gae (PPO:
    generalised advantage estimation with a value head)."""
    policy_loss: str = "clip"
    """clip (PPO's clipped ratio of each token; GRPO, DAPO), sequence_clip (GSPO: one ratio per sequence), cispo (the clipped
    ratio weighs the token's logprob, and no token loses its gradient)."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    """With policy_loss=clip: the loss of a token with a negative advantage is at most this many times |advantage|; 0: off."""
    aggregation: str = "token_mean"
    """Tokens to batch: token_mean (DAPO), seq_mean_token_sum, seq_mean_token_mean (GRPO, GSPO), seq_mean_token_sum_norm (Dr. GRPO:
    sums over a constant, ``aggregation_tokens``)."""
    aggregation_tokens: int = 0
    """L_max that seq_mean_token_sum_norm divides by."""
    proximal: str = "engine"
    """Whose logprobs are π_old of the ratio: engine (those that the tokens were sampled with), trainer (computed again before
    the first update of a step: what PPO calls old, and decoupled PPO the proximal policy)."""
    correction: str = "none"
    """With proximal=trainer, what is done about π_old / π_engine: none, truncate (weigh each token by it, at most
    ``correction_cap``: truncated importance sampling), mask (leave tokens above the cap out), sequence_truncate, sequence_mask (the same
    with the ratio of whole sequences)."""
    correction_cap: float = 2.0
    kl_coefficient: float = 0.0
    """Weight of the KL divergence (k3) from the reference model in the loss; 0: no reference model is loaded."""
    kl_model: str = ""
    """Directory of the reference model; empty: model.path."""
    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus."""
    gae_gamma: float = 1.0
    gae_lambda: float = 1.0
    value_coefficient: float = 0.5
    value_clip: float = 0.2
    """Clipped value loss: how far a value may move from its old one; 0: unclipped."""
    value_learning_rate: float = 1.0e-3
    """Of the value head alone."""
    mini_batches: int = 1
    """Optimizer steps per pass over a step's groups, which are dealt out evenly."""
    epochs: int = 1
    """Passes over a step's groups."""
    overlong_filtering: bool = True
    """Leave rollouts that were cut out of the loss (DAPO §3.4)."""
    overlong_finishes: list[str] = field(default_factory=lambda: ["turn_tokens", "rollout_tokens", "context"])
    """The finish reasons that count as cut; turns, repetition and stop_string can be added."""
    soft_overlong_cache_tokens: int = 0
    """L_cache of the soft overlong punishment; 0: off."""
    max_response_tokens: int = 0
    """L_max of the soft overlong punishment (trained tokens per rollout); needed when the cache is set."""
    zero_stage: int = 1
    dtype: str = "float32"
    ranks_per_node: int = 1
    threads: int = 2
    """CPU threads per rank; GPUs ignore it."""
    micro_batch_tokens: int = 1024
    """Padded tokens per forward pass and rank."""
    share_prompts: bool = True
    """Compute the prompt of a group once, its samples packed behind it; false: a padded row for each sample."""
    gradient_checkpointing: bool = False
    offload: str = "none"
    """What lies in the memory of the CPU instead of the GPU's: none, optimizer (its state; zero_stage 1 and up), all (the weights
    too; zero_stage 3)."""
    deepspeed_file: str = ""
    """Your own DeepSpeed JSON, merged over the one that these settings make."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Merged over both."""
    staleness: int = 0
    """0: synchronous. k: rollouts are made up to k batches ahead of training, and none older than k weight versions is
    trained on: a group with an older token is left out and counted (groups_stale)."""
    pause_admission: bool = False
    """Start no rollout while new weights are being loaded."""
    publish: str = "disk"
    """How weights reach the servers: disk (safetensors on a path that they see), direct (sent from the trainer to each
    server's processes, nothing is written)."""
    checkpoint_every: int = 5
    """Steps between resumable checkpoints; the last step always gets one."""
    keep_checkpoints: int = 2
    """The newest, each can be resumed from."""
    keep_best: bool = True
    """Keep the model with the best held-out reward too, under checkpoints/best."""
    eval_every: int = 0
    """Steps between held-out evaluations; 0: only before the first and after the last step."""
    eval_prompts: int = 64
    """Held-out prompts of an evaluation, as far as there are so many; 0: nothing is evaluated, and no best model kept."""
    eval_samples: int = 1
    eval_temperature: float = 1.0
    probe_tolerance: float = 0.0
    """Largest |engine − trainer| logprob difference on the probe after a weight update, nats. 0: 0.05 where engine and trainer both
    compute in float32, else 0.5."""
    wandb: str = "off"
    """Weights & Biases: off, offline (written to the run directory; `wandb sync` sends it), online."""
    wandb_project: str = "prorl"
    """The project there that the run belongs to."""
