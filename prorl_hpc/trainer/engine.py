"""The DeepSpeed engine around the policy: the optimizer steps of one batch over any number of micro-batches.

Every method but the constructor's pure parts is collective: all ranks call it with the same arguments.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.trainer import engine_state, out_of_memory
from prorl_hpc.trainer.batches import TrainingBatch, check_vocabulary
from prorl_hpc.trainer.deepspeed_settings import (
    choose_dtype,
    deepspeed_config,
    own_optimizer,
    parameter_groups,
    set_learning_rate,
)
from prorl_hpc.trainer.layer_hooks import call_at_layers
from prorl_hpc.trainer.layout import MicroBatch, collate, make_rows, micro_batches, share_out
from prorl_hpc.trainer.loss_sums import LossSums
from prorl_hpc.trainer.losses import LossSettings, TokenTerms, training_loss
from prorl_hpc.trainer.policy import Policy, chunks_of, load_policy
from prorl_hpc.trainer.prepass import AdvantageFigures, Part, add_advantages, batch_spread
from prorl_hpc.trainer.reference import Reference
from prorl_hpc.trainer.skipped_updates import SkippedUpdates, Update
from prorl_hpc.trainer.stopping import Stopped, StopSignal

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class StepOutcome:
    """Numbers of one batch's optimizer steps, over all ranks. ``micro_batches``: of this rank, in one pass over the batch.
    ``computed_tokens``: tokens that went through the model forwards and backwards, all passes together."""

    metrics: dict[str, float]
    micro_batches: int
    computed_tokens: int


class Engine:
    """Policy, optimizer and the collectives between ranks. ``commands``: a gloo group for small things. ``reference_path``: the
    model that ``trainer.kl_coefficient`` holds the policy to."""

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        stop: StopSignal,
        *,
        world: int,
        commands: dist.ProcessGroup,
        reference_path: str = "",
    ) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.stop, self.world, self.commands = config, stop, world, commands
        self.rank = dist.get_rank()
        self.dtype = choose_dtype(config.dtype)
        self.device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
        )
        self._in_updates, self._skipped = False, SkippedUpdates(config)
        settings = deepspeed_config(config, self.dtype)
        self.stage: int = config.zero_stage
        with out_of_memory.explained(config, "while it loaded the model"):
            self.policy = self._load_policy(model_path)
            self.weight_bytes = sum(p.nbytes for p in self.policy.lm.parameters())
            self._reference = None
            if config.kl_coefficient:
                self._reference = Reference(reference_path or model_path, config, self.policy, self.device)
                self.policy.shares_prompts &= self._reference.shares_prompts
            self._deepspeed = self._initialize(settings)
        if world == 1 and self.stage < 3:
            # Ranks in lockstep can only leave off together, between micro-batches; alone, at any layer.
            call_at_layers(self.policy.lm, self._check_stop)

    def _load_policy(self, path: str) -> Policy:
        config = self.config
        policy = load_policy(
            path,
            self.dtype,
            gradient_checkpointing=config.gradient_checkpointing,
            value_head=config.advantage == "gae",
            entropy_gradient=config.entropy_coefficient != 0,
        )
        policy.to(self.device)
        if note := policy.check_against_model():
            log.warning("%s", note)
        policy.shares_prompts &= config.share_prompts
        return policy

    def _initialize(self, settings: dict[str, Any]) -> Any:
        import deepspeed

        groups = parameter_groups(self.policy, self.policy.value_head, self.config)
        own = None if "optimizer" in settings else own_optimizer(groups, self.config)
        return deepspeed.initialize(
            model=self.policy, optimizer=own, model_parameters=groups, config=settings, dist_init_required=False
        )[0]

    def train(self, batch: TrainingBatch, learning_rate: float) -> StepOutcome:
        """``epochs`` × ``mini_batches`` optimizer steps, each normalised over its whole mini-batch. Raises Stopped before the first of
        them, between micro-batches (alone: layers), never after it; RunError for a token id that the model does not have, before
        anything has changed, for memory that ran out, and for steps in a row without one finite gradient (skipped_updates)."""
        check_vocabulary(batch, self.policy.lm.config.get_text_config().vocab_size)
        config = self.config
        minis = batch.mini_batches(config.mini_batches, config) if config.mini_batches > 1 else [batch]
        shares = [self._share(mini) for mini in minis]
        longest = max(part.longest_row for share in shares for part in share)
        updates: list[Update] = []
        with out_of_memory.explained(config, f"in a step whose longest row has {longest} tokens"):
            advantages = self._before_updates(batch, shares)
            try:
                for _ in range(config.epochs):
                    for share in shares:
                        updates.append(self._update(share, learning_rate))
            finally:
                self._in_updates = False
        metrics = self._metrics(updates, learning_rate) | advantages.metrics()
        tokens = config.epochs * sum(self._gather(sum(len(row) for share in shares for p in share for row in p.rows)))
        return StepOutcome(metrics, sum(map(len, shares)), tokens)

    def _metrics(self, updates: Sequence[Update], learning_rate: float) -> dict[str, float]:
        """Of the updates that were made; the others are counted. RunError where they are too many."""
        norms = [update.norm for update in updates if update.norm is not None]
        made = self._over_ranks([update for update in updates if update.norm is not None])
        skipped = self._over_ranks([update for update in updates if update.norm is None])
        self._skipped.count(len(updates) - len(norms), len(updates), learning_rate, skipped.loss)
        counts = {"optimizer_steps": float(len(norms)), "updates_skipped": float(len(updates) - len(norms))}
        if not norms:
            return counts
        return made.means() | {"loss": made.loss / len(norms), "grad_norm": sum(norms) / len(norms)} | counts

    def _share(self, batch: TrainingBatch) -> list[Part]:
        """This rank's micro-batches, as many as every other rank has."""
        budget = self.config.micro_batch_tokens
        rows = make_rows(batch.samples, budget, share_prompts=self.policy.shares_prompts)
        cut = micro_batches(rows, budget)
        # Under ZeRO-3 each call of the output layer gathers it from all ranks, so all have to call it equally often.
        most = max(sum(len(row.targets) for row in micro) for micro in cut)
        chunks = chunks_of(most) if self.stage == 3 else 0
        return [Part(rows, chunks) for rows in share_out(cut, self.world)[self.rank]]

    def _before_updates(self, batch: TrainingBatch, shares: Sequence[Sequence[Part]]) -> AdvantageFigures:
        """Whatever of the parts must come from the weights that the step begins with."""
        config = self.config
        parts = [part for share in shares for part in share]
        # With one update π_old is the policy itself, and its forward pass gives both.
        old = config.proximal == "trainer" and config.epochs * len(shares) > 1
        values = config.advantage == "gae"
        for part in parts if old or values or self._reference else []:
            self._stop_together()
            micro = collate(part.rows, self.device)
            if self._reference:
                part.reference_logprobs = self._reference.logprobs(micro, part.chunks)
            if old or values:
                with torch.no_grad():
                    logprobs, _, part.old_values = self._deepspeed(*micro.inputs, config.temperature, part.chunks)
                part.old_logprobs = logprobs if old else None
        if not values:
            return batch_spread(batch)
        return add_advantages(parts, config, self.device, self._gather)

    def _update(self, share: Sequence[Part], learning_rate: float) -> Update:
        """One optimizer step, or none on any rank where the loss or the gradient is not finite."""
        settings, sums = LossSettings.of(self.config), LossSums()
        for index, part in enumerate(share):
            self._stop_together()
            self._deepspeed.set_gradient_accumulation_boundary(index == len(share) - 1)
            terms = self._terms(part, collate(part.rows, self.device))
            loss, part_sums = training_loss(terms, settings)
            # What the updates of this step have changed is no difference between engine and trainer.
            drifted = self._in_updates and self.config.proximal == "engine"
            sums += part_sums.without_gap() if drifted else part_sums
            if not math.isfinite(part_sums.loss):
                # Where a clip hides the term that is not finite, the gradient could be. This one is not, on any rank.
                loss = terms.logprobs.sum() * math.nan
            # DeepSpeed averages gradients over the ranks; the weights are already shares in the global batch.
            self._deepspeed.backward(loss * self.world)
        set_learning_rate(self._deepspeed.optimizer, learning_rate, self.config)
        norm = self._plain_gradient_norm()
        if norm is not None and self._on_any_rank(not math.isfinite(norm)):
            self._deepspeed.zero_grad()
            return Update(sums, None)
        # From here on the step is carried through: half of its updates would be no state to resume from.
        self._in_updates = True
        self._deepspeed.step()
        if (
            not self._deepspeed.was_step_applied()
        ):  # all but the plain optimizer look at the norm, of all ranks, themselves
            return Update(sums, None)
        return Update(sums, float(self._deepspeed.get_global_grad_norm()) if norm is None else norm)

    def _terms(self, part: Part, micro: MicroBatch) -> TokenTerms:
        logprobs, entropy, values = self._deepspeed(*micro.inputs, self.config.temperature, part.chunks)
        old, engine = micro.engine_logprobs, None
        if self.config.proximal == "trainer":
            old = logprobs.detach() if part.old_logprobs is None else part.old_logprobs
            engine = micro.engine_logprobs
        return TokenTerms(
            logprobs,
            old,
            micro.advantages if part.advantages is None else part.advantages,
            micro.weights,
            micro.sequences,
            engine_logprobs=engine,
            reference_logprobs=part.reference_logprobs,
            entropy=entropy,
            values=values,
            old_values=part.old_values,
            returns=part.returns,
        )

    def _plain_gradient_norm(self) -> float | None:
        """‖g‖₂ before clipping where no ZeRO optimizer computes it (stage 0 in float32)."""
        if self.stage > 0 or self.dtype != torch.float32:
            return None
        norms = [p.grad.norm() for p in self.policy.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())

    def _check_stop(self) -> None:
        if not self._in_updates:
            self.stop.check()

    def _stop_together(self) -> None:
        if self._in_updates:
            return
        if self._on_any_rank(self.stop.requested):
            raise Stopped

    def _on_any_rank(self, mine: bool) -> bool:
        flag = torch.tensor([int(mine)])
        if self.world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.commands)
        return bool(flag.item())

    def _gather(self, mine: T) -> list[T]:
        """``mine`` of every rank."""
        if self.world == 1:
            return [mine]
        everybody: list[Any] = [None] * self.world
        dist.all_gather_object(everybody, mine, group=self.commands)
        return everybody

    def _over_ranks(self, updates: Sequence[Update]) -> LossSums:
        total = LossSums()
        for of_rank in self._gather([astuple(update.sums) for update in updates]):
            for one in of_rank:
                total += LossSums(*one)
        return total

    def score(self, token_ids: list[int]) -> list[float]:
        """Logprobs of tokens 1..n-1 given those before, at temperature 1 (length n-1)."""
        ids = torch.tensor([token_ids], device=self.device)
        places = torch.arange(len(token_ids), device=self.device)
        with torch.no_grad():
            logprobs = self._deepspeed(ids, places[None], None, places[:-1], ids[0, 1:])[0]
        result: list[float] = logprobs.tolist()
        return result

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the model under their Hugging Face names, see ``engine_state.whole_weights``; never those of the value head."""
        return engine_state.whole_weights(self.policy.lm, self.stage)

    def optimizer_state(self) -> dict[str, Any]:
        """This rank's part of the optimizer state, without what the weights say already."""
        return engine_state.optimizer_state(self._deepspeed.optimizer, self.dtype)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restore what ``optimizer_state`` gave to the same rank of as many, under the same ZeRO stage. After ``load_extra_state``."""
        engine_state.load_optimizer_state(
            self._deepspeed.optimizer, self.dtype, state, rank=self.rank, world=self.world
        )

    def extra_state(self) -> dict[str, Tensor]:
        """What is trained besides the Hugging Face model, whole, the same on every rank: the value head, with advantage=gae."""
        return engine_state.value_head_state(self.policy, self.stage)

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``extra_state`` gave. Raises RunError where it is not this run's."""
        engine_state.load_value_head_state(self.policy, self.stage, state)


def prepare_deepspeed() -> None:
    """Import DeepSpeed for this machine and hand it the process group that exists. Its shared-memory collective for CPUs
    is switched off: compiling it takes a minute, and it is of use between many ranks on one node only."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
