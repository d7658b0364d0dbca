"""The training loop of rank 0: rollouts, an optimizer step, new weights to the servers, and again.

Synchronous: the rollouts of a step come from the weights of the step before; with trainer.when_full=carry, groups that
were in flight when a step was full end in the next one, their older tokens written by older weights. One optimizer
step per batch, so the engine's recorded logprobs are π_old.

What is ordered is a function of the configuration and the position alone. A loop that starts again at an earlier position
so orders the same batches by the same names, and gets what was finished of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, BatchState
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import RunError, ServiceError
from prorl_hpc.messages.inference import WeightProbe
from prorl_hpc.messages.status import TrainerStatus
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.slurm.plan import make_plan
from prorl_hpc.trainer.batches import training_batch
from prorl_hpc.trainer.broken_steps import BrokenSteps
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.crew import Crew
from prorl_hpc.trainer.orders import evaluation_order, training_order
from prorl_hpc.trainer.prompts import PromptOrder, Row
from prorl_hpc.trainer.publish import announce
from prorl_hpc.trainer.publisher import Publisher
from prorl_hpc.trainer.rollout_service import RolloutService
from prorl_hpc.trainer.step_metrics import TensorBoard, evaluation_metrics, rollout_metrics
from prorl_hpc.trainer.stopping import Stopped, StopSignal

log = logging.getLogger(__name__)
T = TypeVar("T")
_STEPS_FOR_A_PACE = 2


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
        board: TensorBoard,
        *,
        train_rows: list[Row],
        heldout_rows: list[Row],
        probe_ids: list[int],
        position: Position,
    ) -> None:
        self.config, self.settings, self.run_directory = config, config.trainer, run
        self.service, self.crew, self.stop, self.publisher, self.board = service, crew, stop, publisher, board
        self.prompts = PromptOrder(train_rows, config.run.seed)
        self.heldout = heldout_rows[: config.trainer.eval_prompts]
        self.probe_ids = probe_ids
        self.servers = frozenset(p.name for p in make_plan(config).processes if p.llm_server)
        self.position = position
        self.metrics = MetricsLog(run.metrics_file)
        self.weight_version = 0
        self._seconds: dict[str, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=5)
        """Of whole steps of this attempt: the pace."""
        self._has_head_start = False
        self._broken = BrokenSteps()
        self._last: dict[str, Any] = {}
        evaluations = newest_per_step(self.metrics.read(), "eval")
        self._evaluated = {int(record["step"]): record.get("reward") for record in evaluations}

    # --- the whole ---

    async def run(self) -> None:
        try:
            await self._train()
        except Stopped:
            await self._leave_off()
            raise

    async def _train(self) -> None:
        await self._wait_for_servers()
        await self._publish()
        if self.position.step not in self._evaluated:
            await self._evaluate_if_due()  # at the start, or left off between a step and its evaluation
        while self.position.step < self.settings.steps:
            await self._step()
            await self._evaluate_if_due()
        self._say("done")

    async def _evaluate_if_due(self) -> None:
        step, every = self.position.step, self.settings.eval_every
        if step in (0, self.settings.steps) or (every and step % every == 0):
            await self._evaluate()

    async def _leave_off(self) -> None:
        """Leave a checkpoint of the last complete step. The running batch stays: who resumes from here asks for it."""
        log.info("stopping after step %d", self.position.step)
        self._say("saving", "stopping: saving a checkpoint to resume from")
        path = await self.crew.save(self.position)
        log.info("stopped; %s can be resumed from", path)

    # --- one step ---

    async def _step(self) -> None:
        number, started = self.position.step + 1, time.monotonic()
        self._seconds, self._has_head_start = {}, False
        rows = self.prompts.take(self.position.cursor, self.settings.max_rows_per_step)
        result = await self._rollouts(training_order(self.config, number, rows), "rollouts")
        record = {"kind": "step", "step": number} | rollout_metrics(result, self.weight_version)
        trained = False
        try:
            trained = await self._learn(result, record)
            self.position = Position(number, self.position.cursor + result.progress.rows_used)
            if trained:
                record["probe_gap"] = await self._publish()
            if number % self.settings.checkpoint_every == 0 or number == self.settings.steps:
                await self._save()
        finally:
            # Also when a stop falls between the optimizer step and here: the checkpoint will hold this step.
            if self.position.step == number:
                self._record_step(record, started)

    async def _learn(self, result: BatchResult, record: dict[str, Any]) -> bool:
        """Train on ``result`` and add to ``record``; False if there was nothing to learn from."""
        self._broken.count(result)
        batch = training_batch(result, self.settings)
        record["tokens_trained"] = batch.total_tokens
        progress = result.progress
        if not batch.samples:
            log.warning(
                "step %d: no group to learn from (%d uniform, %d broken of %d started): the weights stay as they are",
                record["step"],
                progress.uniform,
                progress.broken,
                progress.rows_used + progress.carried_in,
            )
            return False
        if progress.state is BatchState.EXHAUSTED:
            log.warning(
                "step %d: only %d of %d groups could be had from %d prompts (trainer.max_rows_per_step); training on those",
                record["step"],
                progress.accepted,
                progress.groups_wanted,
                progress.rows_used,
            )
        rate = self._learning_rate(record["step"])
        with self._phase("training", f"{len(batch.samples)} samples, {batch.total_tokens} tokens"):
            outcome = await self.crew.train(batch, rate)
        record |= outcome.metrics
        record |= {
            "learning_rate": rate,
            "micro_batches": outcome.micro_batches,
            "tokens_computed": outcome.computed_tokens,
        }
        return True

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up over ``warmup_steps``, then constant."""
        return self.settings.learning_rate * min(1.0, step / max(1, self.settings.warmup_steps))

    def _record_step(self, record: dict[str, Any], started: float) -> None:
        total = time.monotonic() - started
        if not self._has_head_start:
            self._step_seconds.append(total)
        rollouts = self._seconds["rollouts"] or 1e-9
        record |= {
            "time": time.time(),
            "weight_version": self.weight_version,
            "seconds": self._seconds | {"total": total},
            "rollouts_per_s": record["rollouts"] / rollouts,
            "tokens_per_s": record["tokens_generated"] / rollouts,
        }
        if (training := self._seconds.get("training")) is not None:
            record["training_tokens_per_s"] = record["tokens_computed"] / max(training, 1e-9)
        self._last = {key: value for key, value in record.items() if value is not None}
        self._write(self._last)
        log.info(
            "step %d/%d: reward %s, %d rollouts, %.1f s, |engine - trainer| %s",
            record["step"],
            self.settings.steps,
            f"{record['reward']:.3f}" if "reward" in record else "none",
            record["rollouts"],
            total,
            f"{record['logprob_gap_mean']:.1e} nats"
            if "logprob_gap_mean" in record
            else "unknown, nothing was trained",
        )

    # --- the parts ---

    async def _wait_for_servers(self) -> None:
        """Until the service has as many healthy servers as the plan has; after start_timeout_s one will do."""
        wanted = len(self.servers)
        deadline = time.monotonic() + self.config.run.start_timeout_s
        while True:
            status = await self._or_stop(self.service.status())
            healthy = [s for s in status.servers if s.healthy and s.server_id in self.servers]
            if len(healthy) >= wanted:
                return
            if healthy and time.monotonic() > deadline:
                log.warning("going on with %d of %d inference servers: the others may still come", len(healthy), wanted)
                return
            if time.monotonic() > deadline:
                known = ", ".join(
                    f"{s.server_id} ({s.detail or 'healthy' if s.healthy else 'down'})" for s in status.servers
                )
                raise RunError(
                    f"none of {wanted} inference servers was ready after {self.config.run.start_timeout_s:.0f} s "
                    f"(run.start_timeout_s); known: {known or 'none'}. Their logs are in {self.run_directory.logs}"
                )
            self._say("waiting", f"{len(healthy)} of {wanted} inference servers are ready")
            await self._or_stop(asyncio.sleep(0.5))

    async def _publish(self) -> float | None:
        """Offer the weights, have every server load them, check the probe; the largest gap."""
        version = self.position.step + 1  # 0 is what an engine starts with: not yet compared with the trainer's
        with self._phase("publishing", f"weights {version}"):
            probe = WeightProbe(self.probe_ids, await self.crew.score(self.probe_ids), self.settings.probe_tolerance)
            update = await self.publisher.offer(version, probe)
            patience_s = self.config.run.start_timeout_s
            gap = await self._or_stop(announce(self.service, update, patience_s=patience_s))
            self.publisher.delivered()
        self.weight_version = version
        log.info("weights %d are served, probe gap %s", version, "unknown" if gap is None else f"{gap:.2g}")
        return gap

    async def _evaluate(self) -> None:
        step = self.position.step
        self._seconds = {}
        result = await self._rollouts(evaluation_order(self.config, step, self.heldout), "evaluating")
        figures = evaluation_metrics(result)
        if not figures["rollouts"]:
            raise RunError(
                f"the held-out evaluation after step {step} has no finished rollout of {len(self.heldout)} prompts "
                f"({figures['rollouts_failed']} failed{_commonest_failure(result)}): see rollouts/eval-{step}.parquet and the "
                "workers' logs"
            )
        self._evaluated[step] = figures["reward"]
        record = {"kind": "eval", "step": step, "time": time.time(), "seconds": self._seconds["evaluating"]} | figures
        self._write(record)
        log.info("held-out after step %d: %d of %d succeed", step, figures["successes"], figures["rollouts"])

    async def _rollouts(self, spec: BatchSpec, phase: str) -> BatchResult:
        with self._phase(phase, spec.batch_id):
            known = await self._or_stop(self._submit(spec))
            # An attempt before this one has made some of it, or all.
            made = known.rollouts_done + known.rollouts_failed > 0 and not known.carried_in
            self._has_head_start = made or known.state is not BatchState.RUNNING
            result = await self._or_stop(self.service.wait_batch(spec.batch_id))
        if result.progress.state not in (BatchState.DONE, BatchState.EXHAUSTED):
            raise RunError(f"batch {spec.batch_id} ended {result.progress.state}, and nobody here asked for that")
        return result

    async def _submit(self, spec: BatchSpec) -> BatchProgress:
        try:
            return await self.service.submit_batch(spec)
        except ServiceError as error:
            if error.code != "batch_differs":
                raise
            raise RunError(
                f"batch {spec.batch_id} was ordered otherwise by an earlier attempt of this run: its configuration or its "
                f"data were changed since. Undo that, or go on with `prorl-hpc resume --fresh {self.run_directory.path}`, "
                "which discards the recorded rollouts of steps that no checkpoint has"
            ) from error

    async def _save(self) -> None:
        with self._phase("saving", f"checkpoint of step {self.position.step}"):
            await self.crew.save(self.position)

    async def _or_stop(self, work: Awaitable[T]) -> T:
        return await self.stop.guard(work)

    # --- what people see ---

    @contextmanager
    def _phase(self, name: str, detail: str = "") -> Iterator[None]:
        self._say(name, detail)
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        self.board.write(record)

    def _eta_s(self) -> float | None:
        if len(self._step_seconds) < _STEPS_FOR_A_PACE:
            return None
        return (self.settings.steps - self.position.step) * sum(self._step_seconds) / len(self._step_seconds)

    def _say(self, phase: str, detail: str = "") -> None:
        evaluated = self._evaluated
        status = TrainerStatus(
            phase=phase,
            step=self.position.step,
            steps=self.settings.steps,
            time=time.time(),
            reward=self._last.get("reward"),
            heldout_start=evaluated.get(0),
            heldout_last=evaluated[max(evaluated)] if evaluated else None,
            eta_s=self._eta_s(),
            detail=detail,
            last_metrics=self._last,
        )
        write_json(self.run_directory.trainer_status_file, status)


def _commonest_failure(result: BatchResult) -> str:
    """What most of the failed rollouts say, or ""."""
    told = Counter(r.failure.message for group in result.groups for r in group.rollouts if r.failure is not None)
    return "".join(f", {count} of them: {message[:500]}" for message, count in told.most_common(1))
