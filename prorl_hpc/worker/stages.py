"""The rollouts that live on this worker: one sandbox and at most one running stage each.

Invariants: every started stage is reported exactly once, by StageFinished or, if it was discarded, by
Discarded; a rollout's sandbox is freed after EVAL, after any failure and on discard, whatever raised.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.messages.control import Discard, Discarded, ServerRef, StageFinished, StartEval, StartInit, StartRun
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.sandbox.protocol import Runtime, Sandbox, SandboxSpec
from prorl_hpc.tasks.protocol import LLM, AgentHandler, Evaluation, RolloutContext
from prorl_hpc.worker.failures import failure_of, timeout_of

log = logging.getLogger(__name__)

_CANCEL_PATIENCE_S = 2.0
"""How long a cancelled stage may take to end before its sandbox is taken away under it."""


class LLMSource(Protocol):
    """Gives each rollout its LLM (inference.client.LLMClient)."""

    def for_rollout(self, server: ServerRef, rollout_id: str, priority: int) -> LLM: ...


@dataclass(frozen=True)
class Policy:
    """How the policy's chats are written and bounded."""

    chat: ChatFormat
    max_context_tokens: int
    max_turn_tokens: int

    def converse(self, spec: RolloutSpec, llm: LLM) -> TokenConversation:
        return TokenConversation(
            self.chat,
            llm,
            spec.sampling,
            max_context_tokens=self.max_context_tokens,
            max_turn_tokens=self.max_turn_tokens,
            # Not the rollout's id, which differs between runs: a seeded run is repeatable.
            seed_scope=f"{spec.row.get('id', '')}/{spec.sample}",
        )


@dataclass
class _Held:
    """One rollout on this worker."""

    spec: RolloutSpec
    handler: AgentHandler | None = None
    sandbox: Sandbox | None = None
    context: RolloutContext | None = None
    evaluation: Evaluation | None = None
    discarded: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def trajectory(self) -> Trajectory | None:
        if self.context is None or self.context.conversation is None:
            return None
        return self.context.conversation.trajectory


class StageRunner:
    """Runs stages as asyncio tasks and reports through ``report``."""

    def __init__(
        self,
        worker_id: str,
        runtime: Runtime,
        llms: LLMSource,
        policy: Policy,
        handler_for: Callable[[str], AgentHandler],
        report: Callable[[StageFinished | Discarded], Awaitable[None]],
    ) -> None:
        """``handler_for`` gives a task's handler; what it raises fails the rollout's INIT."""
        self._worker_id = worker_id
        self._runtime = runtime
        self._llms = llms
        self._policy = policy
        self._handler_for = handler_for
        self._report = report
        self._held: dict[str, _Held] = {}
        self._sandboxes: set[str] = set()
        self._numbers = itertools.count()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> list[str]:
        """Ids of the rollouts that live here."""
        return sorted(self._held)

    @property
    def sandboxes(self) -> int:
        """Sandboxes that run, or are still being stopped."""
        return len(self._sandboxes)

    # orders

    def start_init(self, order: StartInit) -> None:
        rollout_id = order.spec.rollout_id
        old = self._held.pop(rollout_id, None)
        if old is not None:
            log.warning("%s is started anew: what is left of its earlier attempt is freed", rollout_id)
            self._spawn(self._end(old))
        held = self._held[rollout_id] = _Held(order.spec)
        self._start(held, Stage.INIT, order.budget_s, lambda: self._init(held))

    def start_run(self, order: StartRun) -> None:
        held = self._idle(order.rollout_id, Stage.RUN)
        if held is not None:
            self._start(held, Stage.RUN, order.budget_s, lambda: self._run(held, order.server))

    def start_eval(self, order: StartEval) -> None:
        held = self._idle(order.rollout_id, Stage.EVAL)
        if held is not None:
            self._start(held, Stage.EVAL, order.budget_s, lambda: self._eval(held))

    def discard(self, order: Discard) -> None:
        """Cancel the rollout's stage at once, free its sandbox and answer Discarded."""
        held = self._held.pop(order.rollout_id, None)
        if held is not None:
            held.discarded = True
            if held.task is not None:
                held.task.cancel()
        self._spawn(self._discard(order.rollout_id, held))

    async def close(self) -> None:
        """End all stages and free all sandboxes, without reports."""
        everything = list(self._held.values())
        self._held.clear()
        await asyncio.gather(*(self._end(held) for held in everything), *self._background, return_exceptions=True)

    # stages

    async def _init(self, held: _Held) -> None:
        held.handler = self._handler_for(held.spec.task)
        held.handler.check_row(held.spec.row)
        held.sandbox = await self._runtime.start(SandboxSpec(f"{self._worker_id}-{next(self._numbers)}"))
        self._sandboxes.add(held.sandbox.sandbox_id)
        held.context = RolloutContext(held.spec, held.sandbox)
        await held.handler.init(held.context)

    async def _run(self, held: _Held, server: ServerRef) -> None:
        assert held.handler is not None and held.context is not None, "RUN comes after INIT"
        spec = held.spec
        llm = self._llms.for_rollout(server, spec.rollout_id, spec.priority)
        held.context.conversation = self._policy.converse(spec, llm)
        await held.handler.run(held.context)

    async def _eval(self, held: _Held) -> None:
        assert held.handler is not None and held.context is not None, "EVAL comes after INIT"
        scored = await held.handler.eval(held.context)
        numbers = {"reward": scored.reward, **scored.metrics}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"the task {held.spec.task} scored {name}={value}: expected a finite number")
        held.evaluation = Evaluation(
            float(scored.reward), {name: float(value) for name, value in scored.metrics.items()}
        )

    # machinery

    def _idle(self, rollout_id: str, stage: Stage) -> _Held | None:
        """The rollout if it is here and no stage of it runs; otherwise reports why not."""
        held = self._held.get(rollout_id)
        if held is None:
            failure = Failure(stage, FailureKind.INFRASTRUCTURE, f"{self._worker_id} does not hold {rollout_id}")
            self._spawn(self._report(StageFinished(self._worker_id, rollout_id, stage, failure)))
            return None
        if held.task is not None and not held.task.done():
            log.error("%s was ordered for %s while another stage of it runs: ignored", stage, rollout_id)
            return None
        return held

    def _start(self, held: _Held, stage: Stage, budget_s: float, work: Callable[[], Awaitable[None]]) -> None:
        held.task = asyncio.create_task(
            self._stage(held, stage, budget_s, work), name=f"{held.spec.rollout_id}:{stage}"
        )

    async def _stage(self, held: _Held, stage: Stage, budget_s: float, work: Callable[[], Awaitable[None]]) -> None:
        started = time.monotonic()
        failure: Failure | None = None
        clock = asyncio.timeout(budget_s)
        try:
            async with clock:
                await work()
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and clock.expired():
                failure = timeout_of(stage, budget_s)
            else:
                failure = failure_of(stage, error)
                # A traceback helps only where the fault is in a task's code.
                trace = error if failure.kind is FailureKind.TASK else None
                log.warning("%s failed in %s: %s", held.spec.rollout_id, stage, failure.message, exc_info=trace)
        self._finish(held, stage, failure, clock.expired(), time.monotonic() - started)

    def _finish(self, held: _Held, stage: Stage, failure: Failure | None, timed_out: bool, busy_s: float) -> None:
        """No await between the stage's end and this: a discard finds the stage either running or reported."""
        if held.discarded:
            return
        scored = held.evaluation if stage is Stage.EVAL and failure is None else None
        message = StageFinished(
            self._worker_id,
            held.spec.rollout_id,
            stage,
            failure,
            timed_out and failure is not None,
            held.trajectory if stage is Stage.RUN else None,
            scored.reward if scored else None,
            scored.metrics if scored else {},
            busy_s,
        )
        held.task = None
        over = failure is not None or stage is Stage.EVAL
        if over:
            self._held.pop(held.spec.rollout_id, None)
        self._spawn(self._report_and_free(message, held if over else None))

    async def _report_and_free(self, message: StageFinished, held: _Held | None) -> None:
        try:
            await self._report(message)
        finally:
            if held is not None:
                await self._free(held)

    async def _discard(self, rollout_id: str, held: _Held | None) -> None:
        trajectory: Trajectory | None = None
        if held is not None:
            await self._end(held)
            trajectory = held.trajectory
        await self._report(Discarded(self._worker_id, rollout_id, trajectory))

    async def _end(self, held: _Held) -> None:
        """Cancel the stage that runs, if any, then free the sandbox."""
        held.discarded = True
        if held.task is not None:
            held.task.cancel()
            _, pending = await asyncio.wait({held.task}, timeout=_CANCEL_PATIENCE_S)
            if pending:
                log.error("%s does not end when cancelled: its sandbox is stopped under it", held.spec.rollout_id)
        await self._free(held)

    async def _free(self, held: _Held) -> None:
        sandbox, held.sandbox = held.sandbox, None
        if sandbox is None:
            return
        try:
            await sandbox.stop()
            self._sandboxes.discard(sandbox.sandbox_id)
        except Exception:
            # Not the rollout's fault any more; Runtime.close tries again at the end.
            log.exception("the sandbox %s of %s did not stop", sandbox.sandbox_id, held.spec.rollout_id)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a report could not be sent", exc_info=task.exception())
