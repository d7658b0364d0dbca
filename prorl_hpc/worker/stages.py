"""The rollouts that live on this worker: one sandbox and at most one running stage each.

Invariants: every started stage is reported exactly once, by StageFinished or, if it was discarded, by Discarded (a
Hello may repeat reports); an attempt's sandbox is freed after EVAL, after any failure and on discard, whatever raised,
and after RUN if the task is scored in a fresh one; a Discard is answered within a second, whatever the stage does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from prorl_hpc.agents.conversation import Spent
from prorl_hpc.messages.control import (
    Discard,
    Discarded,
    Held,
    MoveRun,
    ServerTrouble,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
)
from prorl_hpc.messages.errors import ConfigError, InferenceError
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.sandbox.protocol import Runtime, Sandbox, SandboxNeeds, spec_of
from prorl_hpc.tasks.protocol import AgentHandler, Evaluation, RolloutContext, WebSearch, needs_of, wants_fresh_sandbox
from prorl_hpc.worker.attempt import Attempt, TrajectoryError, reported_trajectory, sendable
from prorl_hpc.worker.failures import failure_of, timeout_of
from prorl_hpc.worker.gateway_runs import Runs
from prorl_hpc.worker.llms import LLMSource
from prorl_hpc.worker.outbox import Outbox
from prorl_hpc.worker.policies import Policy

log = logging.getLogger(__name__)

_CANCEL_PATIENCE_S = 0.4
"""How long a cancelled stage may take to end before its sandbox is taken away under it."""
_STOP_PATIENCE_S = 0.4
"""How long that sandbox may take to stop before its attempt is called discarded; it is stopped nevertheless."""


class StageRunner:
    """Runs stages as asyncio tasks and reports through ``outbox``."""

    def __init__(
        self,
        worker_id: str,
        runtime: Runtime,
        llms: LLMSource,
        policies: Mapping[str, Policy],
        handler_for: Callable[[str], AgentHandler],
        outbox: Outbox,
        *,
        move: bool = True,
        outside: Runs | None = None,
        web_search: WebSearch | None = None,
    ) -> None:
        """``handler_for`` gives a task's handler; what it raises fails the rollout's INIT. ``move``: a RUN whose server
        does not answer asks the coordinator for another one. ``outside``: programs play RUN, not the tasks' own loops."""
        self._worker_id = worker_id
        self._runtime = runtime
        self._llms = llms
        self._policies = policies
        self._handler_for = handler_for
        self._outbox = outbox
        self._move = move
        self._outside = outside
        self._web_search = web_search
        self._attempts: dict[str, Attempt] = {}
        self._sandboxes: set[str] = set()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> list[Held]:
        """All that lives here, and what ended here and was not acknowledged."""
        living = [attempt.held() for _, attempt in sorted(self._attempts.items())]
        return [*living, *self._outbox.unacknowledged]

    @property
    def sandboxes(self) -> int:
        """Sandboxes that run, or are still being stopped."""
        return len(self._sandboxes)

    @property
    def settled(self) -> bool:
        """No stage runs or is about to score what RUN has made, and all that ended here was acknowledged."""
        working = any(attempt.running or attempt.awaits_eval for attempt in self._attempts.values())
        return not working and not self._outbox.unacknowledged

    # orders

    def start_init(self, order: StartInit) -> None:
        rollout_id = order.spec.rollout_id
        self._outbox.forget(rollout_id)
        old = self._attempts.pop(rollout_id, None)
        if old is not None:
            log.warning("%s is started anew: what is left of its earlier attempt is freed", rollout_id)
            self._spawn(self._end(old))
        attempt = self._attempts[rollout_id] = Attempt(order.spec)
        self._start(attempt, Stage.INIT, order.budget_s, self._init)

    def start_run(self, order: StartRun) -> None:
        attempt = self._idle(order.rollout_id, Stage.RUN)
        if attempt is not None:
            attempt.server = order.server
            self._start(attempt, Stage.RUN, order.budget_s, self._run)

    def start_eval(self, order: StartEval) -> None:
        attempt = self._idle(order.rollout_id, Stage.EVAL)
        if attempt is not None:
            self._start(attempt, Stage.EVAL, order.budget_s, self._eval)

    def move_run(self, order: MoveRun) -> None:
        attempt = self._attempts.get(order.rollout_id)
        if attempt is None or attempt.running is not Stage.RUN:
            log.info("%s is to be moved, but its RUN is over", order.rollout_id)
            return
        attempt.server = order.server
        if attempt.llm is not None:
            attempt.llm.move(order.server)

    def discard(self, order: Discard) -> None:
        """Cancel the attempt's stage at once, free its sandbox and answer Discarded."""
        attempt = self._attempts.pop(order.rollout_id, None)
        ended = self._outbox.forget(order.rollout_id)
        if attempt is not None:
            attempt.discarded = True
            if attempt.task is not None:
                attempt.task.cancel()
            self._spawn(self._discard(attempt))
        else:
            trajectory = reported_trajectory(ended.reports) if ended is not None else None
            self._outbox.say(Discarded(self._worker_id, order.rollout_id, trajectory))

    async def close(self) -> None:
        """End all stages and free all sandboxes, without reports."""
        everything = list(self._attempts.values())
        self._attempts.clear()
        await asyncio.gather(*(self._end(attempt) for attempt in everything), return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # stages

    async def _init(self, attempt: Attempt) -> None:
        attempt.handler = self._handler_for(attempt.spec.task)
        attempt.handler.check_row(attempt.spec.row)
        needs = needs_of(attempt.handler, attempt.spec.row)
        if self._outside is not None:
            self._outside.check(attempt.handler, attempt.spec)
            needs = self._outside.needs(needs)
        attempt.context = RolloutContext(attempt.spec, await self._start_sandbox(attempt, needs))
        await attempt.handler.init(attempt.context)

    async def _run(self, attempt: Attempt) -> None:
        assert attempt.handler is not None and attempt.context is not None, "RUN comes after INIT"
        if attempt.server is None:
            raise InferenceError("the LLM server was lost before RUN began, and no other takes over")
        spec = attempt.spec
        trouble = self._trouble_of(spec.rollout_id) if self._move else None
        attempt.llm = self._llms.for_rollout(attempt.server, spec.rollout_id, spec.priority, trouble)
        policy, llm, spent, numbers = self._policy_of(spec), attempt.llm, Spent(), itertools.count(1)
        attempt.context.conversation = policy.converse(spec, llm, spent)
        attempt.context.web_search = self._web_search
        attempt.context.converse = lambda: policy.converse(spec, llm, spent, next(numbers))
        if self._outside is None:
            await attempt.handler.run(attempt.context)
        else:
            await self._outside.run(attempt.handler, attempt.context, policy)

    async def _eval(self, attempt: Attempt) -> None:
        assert attempt.handler is not None and attempt.context is not None, "EVAL comes after INIT"
        if attempt.sandbox is None:
            needs = needs_of(attempt.handler, attempt.spec.row)
            attempt.context.sandbox = await self._start_sandbox(attempt, needs)
        scored = await attempt.handler.eval(attempt.context)
        if (reward := self._policy_of(attempt.spec).reward) is not None:
            scored = await reward.of(scored, attempt.context)
        numbers = {"reward": scored.reward, **scored.metrics}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"the task {attempt.spec.task} scored {name}={value}: expected a finite number")
        attempt.evaluation = Evaluation(
            float(scored.reward), {name: float(value) for name, value in scored.metrics.items()}
        )

    async def _start_sandbox(self, attempt: Attempt, needs: SandboxNeeds) -> Sandbox:
        sandbox = await self._runtime.start(spec_of(f"{self._worker_id}-{next(self._numbers)}", needs))
        self._sandboxes.add(sandbox.sandbox_id)
        attempt.sandbox = sandbox
        return sandbox

    def _policy_of(self, spec: RolloutSpec) -> Policy:
        try:
            return self._policies[spec.policy]
        except KeyError:
            known = ", ".join(self._policies)
            raise ConfigError(f"this run has no policy {spec.policy!r}: it has {known}") from None

    def _trouble_of(self, rollout_id: str) -> Callable[[str, str], None]:
        def trouble(server_id: str, message: str) -> None:
            log.warning("%s: %s does not answer (%s)", rollout_id, server_id, message)
            self._outbox.say(ServerTrouble(self._worker_id, rollout_id, server_id, message))

        return trouble

    # machinery

    def _idle(self, rollout_id: str, stage: Stage) -> Attempt | None:
        """The attempt if it is here, idle and before ``stage``; otherwise the report says why not."""
        attempt = self._attempts.get(rollout_id)
        if attempt is None:
            failure = Failure(stage, FailureKind.INFRASTRUCTURE, f"{self._worker_id} does not hold {rollout_id}")
            report = StageFinished(self._worker_id, rollout_id, stage, failure)
            self._outbox.keep(Held(rollout_id, [report]))
            self._outbox.say(report)
            return None
        if attempt.running is not None:
            log.error("%s was ordered for %s while %s of it runs: ignored", stage, rollout_id, attempt.running)
            return None
        if (done := next((report for report in attempt.reports if report.stage is stage), None)) is not None:
            self._outbox.say(done)  # the order crossed a Hello; the work is not done twice
            return None
        return attempt

    def _start(
        self, attempt: Attempt, stage: Stage, budget_s: float, work: Callable[[Attempt], Awaitable[None]]
    ) -> None:
        attempt.running = stage
        attempt.task = self._spawn(self._stage(attempt, stage, budget_s, work))

    async def _stage(
        self, attempt: Attempt, stage: Stage, budget_s: float, work: Callable[[Attempt], Awaitable[None]]
    ) -> None:
        started = time.monotonic()
        failure: Failure | None = None
        clock = asyncio.timeout(budget_s)
        try:
            async with clock:
                await work(attempt)
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and clock.expired():
                failure = timeout_of(stage, budget_s)
            else:
                failure = failure_of(stage, error)
                # A traceback helps only where the fault is in a task's code.
                trace = error if failure.kind is FailureKind.TASK else None
                log.warning("%s failed in %s: %s", attempt.rollout_id, stage, failure.message, exc_info=trace)
        # No await between the stage's end and its report: a discard finds the stage either running or reported.
        if not attempt.discarded:
            failure = self._report(attempt, stage, failure, clock.expired(), time.monotonic() - started)
            if failure is not None or stage is Stage.EVAL or (stage is Stage.RUN and _is_scored_afresh(attempt)):
                await self._free(attempt)

    def _report(
        self, attempt: Attempt, stage: Stage, failure: Failure | None, timed_out: bool, busy_s: float
    ) -> Failure | None:
        """Returns the failure that was reported: what cannot be told of a success is one."""
        scored = attempt.evaluation if stage is Stage.EVAL and failure is None else None
        trajectory, finish, generated_tokens = None, Finish.UNKNOWN, 0
        if stage is Stage.RUN:
            try:
                trajectory = attempt.trajectory()
                finish, generated_tokens = attempt.outcome()
            except TrajectoryError as error:
                log.error("%s: %s", attempt.rollout_id, error)
                failure = failure or failure_of(stage, error)
        report = sendable(
            StageFinished(
                self._worker_id,
                attempt.rollout_id,
                stage,
                failure,
                timed_out and failure is not None,
                trajectory,
                scored.reward if scored else None,
                scored.metrics if scored else {},
                busy_s,
                finish,
                generated_tokens,
            )
        )
        attempt.reports.append(report)
        attempt.running = attempt.task = attempt.llm = None
        if report.failure is not None or stage is Stage.EVAL:
            del self._attempts[attempt.rollout_id]
            self._outbox.keep(attempt.held())
        self._outbox.say(report)
        return report.failure

    async def _discard(self, attempt: Attempt) -> None:
        await self._end(attempt)
        try:
            trajectory = attempt.trajectory()
        except TrajectoryError as error:
            log.error("%s, which was discarded: %s", attempt.rollout_id, error)
            trajectory = None
        self._outbox.say(Discarded(self._worker_id, attempt.rollout_id, trajectory))

    async def _end(self, attempt: Attempt) -> None:
        """Cancel the stage that runs, if any, and free the sandbox; takes no longer than the two patiences."""
        attempt.discarded = True
        if attempt.task is not None:
            attempt.task.cancel()
            _, pending = await asyncio.wait({attempt.task}, timeout=_CANCEL_PATIENCE_S)
            if pending:
                log.error("%s does not end when cancelled: its sandbox is stopped under it", attempt.rollout_id)
                self._tasks.discard(attempt.task)  # nobody waits for it any more
        if attempt.sandbox is not None:
            await asyncio.wait({self._spawn(self._free(attempt))}, timeout=_STOP_PATIENCE_S)

    async def _free(self, attempt: Attempt) -> None:
        sandbox, attempt.sandbox = attempt.sandbox, None
        if sandbox is None:
            return
        try:
            await sandbox.stop()
            self._sandboxes.discard(sandbox.sandbox_id)
        except Exception:
            # Not the rollout's fault any more; Runtime.close tries again at the end.
            log.exception("the sandbox %s of %s did not stop", sandbox.sandbox_id, attempt.rollout_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_scored_afresh(attempt: Attempt) -> bool:
    return attempt.handler is not None and wants_fresh_sandbox(attempt.handler, attempt.spec.row)
