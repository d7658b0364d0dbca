"""The training loop of rank 0: rollouts, optimizer steps, new weights to the servers, and again.

Step s begins with weight version s. With ``trainer.staleness`` 0 its rollouts are ordered then, and all their tokens are of
version s. With staleness k the rollouts of up to k steps are made while the trainer learns (rollouts_ahead), and a group with a
token of a version below s − k is left out of training and counted (age_limit: of a larger k, if the run had one before).

What is ordered is a function of the configuration and the position alone. A loop that starts again at an earlier position
so orders the same batches by the same names, and gets what was finished of them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchResult, BatchState
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.observe.wording import commonest_failure
from prorl_hpc.trainer.age_limit import AgeLimit
from prorl_hpc.trainer.batches import training_batch
from prorl_hpc.trainer.best_model import BestModel
from prorl_hpc.trainer.broken_steps import BrokenSteps
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.checkpoint_files import CheckpointNotWritten
from prorl_hpc.trainer.crew import Crew
from prorl_hpc.trainer.heldout_set import HeldOutSet
from prorl_hpc.trainer.metric_writers import MetricWriters
from prorl_hpc.trainer.orders import Ordered, batches_ahead, evaluation_order, ordered, training_order
from prorl_hpc.trainer.progress import TrainingProgress
from prorl_hpc.trainer.prompts import PromptOrder, Row
from prorl_hpc.trainer.publisher import Publisher
from prorl_hpc.trainer.rollout_service import RolloutService
from prorl_hpc.trainer.rollouts_ahead import RolloutsAhead
from prorl_hpc.trainer.served_weights import ServedWeights
from prorl_hpc.trainer.step_metrics import evaluation_metrics, rollout_metrics, speeds, token_ages
from prorl_hpc.trainer.stopping import Stopped, StopSignal

log = logging.getLogger(__name__)
TOLD_TOO_S = 10.0
"""After the coordinator, the trainer is told to end within this time; longer than any node's look at the marks takes."""


class TrainingLoop:
    """``rows`` by split; ``position`` is where to go on. ``run`` returns when all steps are done or raises Stopped."""

    def __init__(
        self,
        config: ProrlConfig,
        run: RunDirectory,
        service: RolloutService,
        crew: Crew,
        stop: StopSignal,
        publisher: Publisher,
        writers: MetricWriters,
        *,
        train_rows: list[Row],
        heldout_rows: list[Row],
        probe_ids: list[int],
        position: Position,
    ) -> None:
        self.config, self.settings, self.run_directory = config, config.trainer, run
        self.service, self.crew, self.stop = service, crew, stop
        self.prompts = PromptOrder(train_rows, config.run.seed)
        self.heldout = heldout_rows[: config.trainer.eval_prompts]
        self.position = position
        self.weights = ServedWeights(config, run, service, crew, publisher, stop, probe_ids)
        self.progress = TrainingProgress(run, writers, position.step, config.trainer.steps)
        self.progress.make_up(crew.saved_line)
        self._broken = BrokenSteps()
        self._age_limit = AgeLimit.of(run, config.trainer.staleness, position.step)

    # --- the whole ---

    async def run(self) -> None:
        try:
            try:
                await self._train()
            except ServiceError as error:
                if error.code != "shutting_down":
                    raise
                # The attempt ends, and the coordinator, on another node, has been told first.
                await self.stop.guard(asyncio.sleep(TOLD_TOO_S))
                raise
        except Stopped:
            await self._leave_off()
            raise

    async def _train(self) -> None:
        await self.weights.wait_for_servers(lambda detail: self.progress.say("waiting", detail))
        await self._publish()
        start, settings = self.position, self.settings
        ahead = batches_ahead(settings)
        async with RolloutsAhead(
            self._order, lead=ahead, step=start.step, cursor=start.cursor, steps=settings.steps
        ) as batches:
            if not self.progress.is_evaluated(start.step):
                await self._evaluate_if_due()  # at the start, or left off between a step and its evaluation
            while self.position.step < settings.steps:
                await self._step(batches)
                await self._evaluate_if_due()
        self.progress.say("done")

    async def _evaluate_if_due(self) -> None:
        step, every = self.position.step, self.settings.eval_every
        if self.settings.eval_prompts == 0:
            return
        if step in (0, self.settings.steps) or (every and step % every == 0):
            await self._evaluate()

    async def _leave_off(self) -> None:
        """Leave a checkpoint of the last complete step. Batches under way stay: who resumes from here asks for them."""
        log.info("stopping after step %d", self.position.step)
        self.progress.say("saving", "stopping: saving a checkpoint to resume from")
        path = await self.crew.save(self.position)
        log.info("stopped; %s can be resumed from", path)

    # --- one step ---

    async def _step(self, batches: RolloutsAhead) -> None:
        number = self.position.step + 1
        self.progress.begin()
        with self.progress.phase("rollouts", f"step-{number}"):
            made = await self.stop.guard(batches.next())
        result = made.result
        record = {"kind": "step", "step": number} | rollout_metrics(result)
        try:
            await self._learn(result, record)
            self._moved_to(Position(number, made.cursor))
            record["probe_gap"] = await self._publish()
            batches.trained(number)
            if number % self.settings.checkpoint_every == 0 or number == self.settings.steps:
                await self._save(self._line(record, result))
        finally:
            # Also when a stop falls between the optimizer step and here: the checkpoint will hold this step.
            if self.position.step == number:
                self._record_step(record, result, sets_pace=not made.has_head_start)

    async def _learn(self, result: BatchResult, record: dict[str, Any]) -> None:
        """Train on ``result``, if there is something to learn from, and add to ``record``."""
        step, version = record["step"], self.weights.version
        oldest = version - self._age_limit.at(step)
        batch = training_batch(result, self.settings, oldest_allowed=oldest)
        record |= {"tokens_trained": batch.total_tokens, "groups_stale": batch.stale_groups or None}
        self._broken.count(result, batch.stale_groups)
        record |= token_ages(result, batch, version, oldest)
        if not batch.samples:
            log.warning(
                "step %d: no group to learn from (%s): the weights stay as they are", step, _groups_told(record)
            )
            return
        progress = result.progress
        if progress.state is BatchState.EXHAUSTED:
            log.warning(
                "step %d: only %d of %d groups could be had from %d prompts (trainer.max_rows_per_step); training on those",
                step,
                progress.accepted,
                progress.groups_wanted,
                progress.rows_used,
            )
        rate = self._learning_rate(step)
        with self.progress.phase("training", f"{len(batch.samples)} samples, {batch.total_tokens} tokens"):
            outcome = await self.crew.train(batch, rate)
        record |= outcome.metrics
        record |= {
            "learning_rate": rate,
            "micro_batches": outcome.micro_batches,
            "tokens_computed": outcome.computed_tokens,
        }

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up over ``warmup_steps``, then constant."""
        return self.settings.learning_rate * min(1.0, step / max(1, self.settings.warmup_steps))

    def _record_step(self, record: dict[str, Any], result: BatchResult, *, sets_pace: bool) -> None:
        record = self._line(record, result)
        self.progress.write_step(record, sets_pace=sets_pace)
        log.info(
            "step %d/%d: reward %s, %d rollouts, %.1f s (%.0f %% idle), |engine - trainer| %s",
            record["step"],
            self.settings.steps,
            f"{record['reward']:.3f}" if "reward" in record else "none",
            record["rollouts"],
            record["seconds"]["total"],
            100 * record["idle_fraction"],
            f"{record['logprob_gap_mean']:.1e} nats"
            if "logprob_gap_mean" in record
            else "unknown, nothing was trained",
        )

    def _line(self, record: dict[str, Any], result: BatchResult) -> dict[str, Any]:
        rates = speeds(record, result, self.progress.seconds)
        return self.progress.line(record | {"weight_version": self.weights.version} | rates)

    # --- the parts ---

    async def _order(self, step: int, cursor: int) -> Ordered:
        rows = self.prompts.take(cursor, self.settings.max_rows_per_step)
        return await ordered(self.service, training_order(self.config, step, rows), self.run_directory.path)

    async def _publish(self) -> float | None:
        version = self.position.step + 1  # 0 is what an engine starts with: not yet compared with the trainer's
        with self.progress.phase("publishing", f"weights {version}"):
            return await self.weights.publish(version)

    async def _evaluate(self) -> None:
        """Held-out prompts on the present weights alone: none are published meanwhile."""
        step = self.position.step
        self.progress.begin()
        spec = evaluation_order(self.config, step, self.heldout)
        with self.progress.phase("evaluating", spec.batch_id):
            result = (await self.stop.guard(ordered(self.service, spec, self.run_directory.path))).result
        figures = evaluation_metrics(result)
        if not figures["rollouts"]:
            raise RunError(
                f"the held-out evaluation after step {step} has no finished rollout of {len(self.heldout)} prompts "
                f"({figures['rollouts_failed']} failed{commonest_failure(result)}): see rollouts/eval-{step}.parquet and the "
                "workers' logs"
            )
        held_out = HeldOutSet.of(spec)
        told = {"step": step, "weight_version": self.weights.version, "held_out": msgspec.to_builtins(held_out)}
        # First: with its line, the evaluation is over for whoever resumes.
        await self.crew.keep_best(BestModel(step, figures["reward"], held_out))
        self.progress.write_evaluation(told | figures)
        log.info("held-out after step %d: %d of %d succeed", step, figures["successes"], figures["rollouts"])

    async def _save(self, line: dict[str, Any]) -> None:
        """The model that was trained must be saved; before the end, a checkpoint that the disk refuses is made up for by the
        next one. ``line``: of the step in metrics.jsonl, which is written when the seconds of saving are known."""
        with self.progress.phase("saving", f"checkpoint of step {self.position.step}"):
            try:
                await self.crew.save(self.position, line)
            except CheckpointNotWritten as error:
                if self.position.step == self.settings.steps:
                    raise
                log.error("%s. Training goes on; the next try is in %d steps", error, self.settings.checkpoint_every)

    def _moved_to(self, position: Position) -> None:
        self.position, self.progress.step = position, position.step


def _groups_told(record: dict[str, Any]) -> str:
    counts = [(record.get(f"groups_{kind}") or 0, kind) for kind in ("uniform", "broken", "stale", "equal_rewards")]
    return ", ".join(f"{n} {kind.replace('_', ' ')}" for n, kind in counts if n) or "none was accepted"
