"""The DeepSpeed engine around the policy: one optimizer step over any number of micro-batches.

Every method but the constructor's pure parts is collective: all ranks call it with the same arguments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.trainer.batches import TrainingBatch, check_vocabulary
from prorl_hpc.trainer.layout import collate, make_rows, micro_batches, share_out
from prorl_hpc.trainer.loss_sums import LossSums
from prorl_hpc.trainer.losses import LossSettings, TokenTerms, training_loss
from prorl_hpc.trainer.policy import Policy, load_policy
from prorl_hpc.trainer.stopping import Stopped, StopSignal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutcome:
    """Numbers of one optimizer step, over all ranks. ``computed_tokens``: tokens that went through the model."""

    metrics: dict[str, float]
    micro_batches: int
    computed_tokens: int


def choose_dtype(name: str) -> torch.dtype:
    """``auto``: bfloat16 on a GPU, float32 without one."""
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ConfigError(f"trainer.dtype={name}: choose auto, {' or '.join(known)}")
    return known[name]


def deepspeed_config(config: TrainerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The DeepSpeed JSON of these settings, with ``trainer.deepspeed`` merged over it."""
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if not torch.cuda.is_available():
        # The defaults reserve gigabytes of buckets.
        zero |= {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000, "overlap_comm": False}
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 1_000_000_000,
    }
    return _merged(made, config.deepspeed)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = _merged(both[key], value) if nested else value
    return both


class Engine:
    """Policy, optimizer and the collectives between ranks. ``commands``: a gloo group for small things."""

    def __init__(
        self, model_path: str, config: TrainerConfig, stop: StopSignal, *, world: int, commands: dist.ProcessGroup
    ) -> None:
        import deepspeed

        torch.set_num_threads(config.threads)
        self.config, self.stop, self.world, self.commands = config, stop, world, commands
        self.rank = dist.get_rank()
        self.dtype = choose_dtype(config.dtype)
        self.device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.policy: Policy = load_policy(model_path, self.dtype, gradient_checkpointing=config.gradient_checkpointing)
        self.policy.to(self.device)
        self.weight_bytes = sum(p.nbytes for p in self.policy.parameters())
        if note := self.policy.check_against_model():
            log.warning("%s", note)
        settings = deepspeed_config(config, self.dtype)
        self.stage: int = settings["zero_optimization"]["stage"]
        self._deepspeed, *_ = deepspeed.initialize(
            model=self.policy, optimizer=self._own_optimizer(settings), config=settings, dist_init_required=False
        )
        if world == 1 and self.stage < 3:
            # Ranks in lockstep can only leave off together, between micro-batches; alone, at any layer.
            _check_at_layers(self.policy.lm, stop.check)

    def _own_optimizer(self, settings: dict[str, Any]) -> torch.optim.Optimizer | None:
        """torch's fused AdamW, unless the user's JSON names an optimizer or offloads it. DeepSpeed's CPU Adam would be
        compiled at start, for a minute and more."""
        config = self.config
        arguments = {"lr": config.learning_rate, "betas": list(config.adam_betas), "weight_decay": config.weight_decay}
        if settings["zero_optimization"].get("offload_optimizer"):
            settings.setdefault("optimizer", {"type": "AdamW", "params": arguments})
        if "optimizer" in settings:
            return None
        return torch.optim.AdamW(
            self.policy.parameters(), **(arguments | {"betas": tuple(config.adam_betas)}), fused=True
        )

    def train(self, batch: TrainingBatch, learning_rate: float) -> StepOutcome:
        """One optimizer step. Raises Stopped between micro-batches (alone: layers), and RunError for a token id that the
        model does not have, before anything has changed."""
        check_vocabulary(batch, self.policy.lm.config.get_text_config().vocab_size)
        budget = self.config.micro_batch_tokens
        rows = make_rows(batch.samples, budget, share_prompts=self.policy.shares_prompts)
        mine = share_out(micro_batches(rows, budget), self.world)[self.rank]
        sums, settings = LossSums(), LossSettings.of(self.config)
        for index, part in enumerate(mine):
            self._stop_together()
            self._deepspeed.set_gradient_accumulation_boundary(index == len(mine) - 1)
            micro = collate(part, self.device)
            logprobs, entropy = self._deepspeed(
                micro.token_ids, micro.positions, micro.visible, micro.sources, micro.targets, self.config.temperature
            )
            terms = TokenTerms(
                logprobs, micro.old_logprobs, micro.advantages, micro.weights, micro.sequences, entropy=entropy
            )
            loss, part_sums = training_loss(terms, settings)
            sums += part_sums
            # DeepSpeed averages gradients over the ranks; the weights are already shares in the global batch.
            self._deepspeed.backward(loss * self.world)
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._plain_gradient_norm()
        self._deepspeed.step()
        if norm is None:
            norm = float(self._deepspeed.get_global_grad_norm())
        metrics = self._over_ranks(sums).means() | {"grad_norm": norm}
        return StepOutcome(metrics, len(mine), sum(map(len, rows)))

    def _plain_gradient_norm(self) -> float | None:
        """‖g‖₂ before clipping where no ZeRO optimizer computes it (stage 0 in float32)."""
        if self.stage > 0 or self.dtype != torch.float32:
            return None
        norms = [p.grad.norm() for p in self.policy.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())

    def _stop_together(self) -> None:
        flag = torch.tensor([int(self.stop.requested)])
        if self.world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.commands)
        if flag.item():
            raise Stopped

    def _over_ranks(self, sums: LossSums) -> LossSums:
        if self.world == 1:
            return sums
        everybody: list[Any] = [None] * self.world
        dist.all_gather_object(everybody, astuple(sums), group=self.commands)
        total = LossSums()
        for one in everybody:
            total += LossSums(*one)
        return total

    def score(self, token_ids: list[int]) -> list[float]:
        """Logprobs of tokens 1..n-1 given those before, at temperature 1 (length n-1)."""
        ids = torch.tensor([token_ids], device=self.device)
        places = torch.arange(len(token_ids), device=self.device)
        with torch.no_grad():
            logprobs, _ = self._deepspeed(ids, places[None], None, places[:-1], ids[0, 1:])
        result: list[float] = logprobs.tolist()
        return result

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under their Hugging Face names, whole, one at a time; a tied output embedding is left out. Collective
        under ZeRO-3, where a tensor is valid until the next is asked for."""
        from deepspeed import zero

        lm = self.policy.lm
        for name, parameter in lm.named_parameters():  # names a shared parameter once, by its first name
            with zero.GatheredParameters([parameter], enabled=self.stage == 3):
                yield name, parameter.detach()
        persistent = lm.state_dict().keys() if self.stage < 3 else _persistent_names(lm)
        for name, buffer in lm.named_buffers():
            if name in persistent:
                yield name, buffer

    def optimizer_state(self) -> dict[str, Any]:
        """This rank's part of the optimizer state. In float32 the master weights are left out: they equal the weights."""
        state: dict[str, Any] = dict(self._deepspeed.optimizer.state_dict())
        if self.dtype == torch.float32:
            for key in _MASTER_WEIGHTS & state.keys():
                state[key] = []
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restore what ``optimizer_state`` gave to the same rank of as many, under the same ZeRO stage."""
        optimizer = self._deepspeed.optimizer
        if not _is_zero(optimizer):
            optimizer.load_state_dict(state)
            return
        by_rank: list[Any] = [None] * self.world
        by_rank[self.rank] = state
        optimizer.load_state_dict(by_rank, load_from_fp32_weights=self.dtype != torch.float32)


    def extra_state(self) -> dict[str, Tensor]:
        """What is trained besides the Hugging Face model."""
        return {}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``extra_state`` gave."""


_MASTER_WEIGHTS = {"single_partition_of_fp32_groups", "fp32_flat_groups"}


def _is_zero(optimizer: Any) -> bool:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    return isinstance(optimizer, ZeROOptimizer)


def _persistent_names(lm: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in lm.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _check_at_layers(lm: nn.Module, check: Callable[[], None]) -> None:
    """Call ``check`` before each layer's forward and during the backward pass after each layer's gradient."""

    def before(module: nn.Module, inputs: Any) -> None:
        check()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: check())

    lists = [m for m in lm.modules() if isinstance(m, nn.ModuleList)]
    for layer in max(lists, key=len, default=nn.ModuleList()):
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def prepare_deepspeed() -> None:
    """Import DeepSpeed for this machine and hand it the process group that exists. Its shared-memory collective for CPUs
    is switched off: compiling it takes a minute, and it is of use between many ranks on one node only."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
