"""Environments of the PyPI package ``verifiers``, which drive their rollouts themselves and score them.

``task.options.env`` is the environment's id, as ``verifiers`` has it: the installed module's name. The environment runs in
a process, and with ``task.options.python`` in a Python, of its own, forked for each rollout from one that has loaded it; its
client talks to this node's LLM gateway, which
records the ids of every call. The trajectory is what the gateway recorded, the reward is what the environment's rubric or
task gave.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.tasks.protocol import Evaluation, GatewayAccess, GatewaySession, RolloutContext
from prorl_hpc.tasks.registry import check_options
from prorl_hpc.tasks.rows import require
from prorl_hpc.tasks.side.options import interpreter_problem, read_mapping, read_name, read_seconds
from prorl_hpc.tasks.side.process import SideEpisode, SideError, SideServer, call_once

log = logging.getLogger(__name__)

_MODULE = "verifiers_rollout"
_LEAVE_S = 30.0
"""How long an environment may go on, to score, when its calls or tokens are used up."""


class VerifiersEnv:
    """An AgentHandler. Rows: id, input (an example of the environment's dataset, or the data of a v1 task)."""

    wants_gateway = True

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ("env", "kwargs", "python", "start_timeout_s"))
        self._env = read_name(task.options, "env", "an environment as verifiers names it, like gsm8k or owner/gsm8k")
        self._python = str(task.options.get("python") or "")
        self._timeout_s = read_seconds(task.options, "start_timeout_s", 120.0)
        self._start = {"env": self._env, "kwargs": read_mapping(task.options, "kwargs")}
        self._server = SideServer(_MODULE, self._python, self._start, self._timeout_s)

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        inputs = self._ask("rows", split=split, size=size, seed=seed)
        if len(inputs) < size:
            raise ConfigError(
                f"task.{split}.size={size}: {self._env} has only {len(inputs)} examples for it. Lower the size"
            )
        return [{"id": f"{split}-{number}", "input": input} for number, input in enumerate(inputs)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        require(row, "input", dict)

    def problems(self) -> Iterator[str]:
        """Asked before a launch: loads the environment once, in its own Python."""
        if problem := interpreter_problem(self._python):
            yield problem
            return
        try:
            self._ask()
        except ConfigError as error:
            yield str(error)

    async def init(self, context: RolloutContext) -> None:
        """The rollout's own process lives within RUN, which ends it whatever happens; here is waited for the one that loads
        the environment, once on each worker."""
        try:
            await self._server.ready()
        except SideError as error:
            raise RuntimeError(f"the environment {self._env}: {error}") from error

    async def run(self, context: RolloutContext) -> None:
        gateway = context.require_gateway()
        with tempfile.TemporaryDirectory(prefix="prorl-verifiers-", ignore_cleanup_errors=True) as scratch:
            try:
                async with self._server.episode() as side:
                    context.notes["scored"] = await self._play(side, context, gateway, scratch)
            except SideError as error:
                if gateway.session.failure is not None:
                    raise gateway.session.failure from error
                raise RuntimeError(f"the environment {self._env}, row {context.spec.row['id']}: {error}") from error

    async def eval(self, context: RolloutContext) -> Evaluation:
        scored = context.notes["scored"]
        return Evaluation(scored["reward"], {**scored["metrics"], "model_calls": scored["calls"]})

    async def _play(
        self, side: SideEpisode, context: RolloutContext, gateway: GatewayAccess, scratch: str
    ) -> dict[str, Any]:
        """The environment's own score. One that breaks because its calls or tokens are used up is scored nevertheless."""
        session = gateway.session
        rollout = side.call(
            "rollout",
            None,
            input=context.spec.row["input"],
            socket=str(gateway.socket),
            key=session.key,
            model=context.spec.policy,
            scratch=scratch,
        )
        playing, over = asyncio.create_task(rollout), asyncio.create_task(session.wait_over())
        try:
            await asyncio.wait({playing, over}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done() and session.failure is None:
                await asyncio.wait({playing}, timeout=_LEAVE_S)
            if session.failure is not None:
                raise session.failure
            scored = _result(playing, session)
        finally:
            playing.cancel()
            over.cancel()
            await asyncio.gather(playing, over, return_exceptions=True)
        conversation = context.require_conversation()
        if scored["error"] and not (session.over or conversation.truncated):
            raise SideError(scored["error"])
        if not session.over:
            conversation.end(Finish.MALFORMED if scored["malformed"] else Finish.ENVIRONMENT)
        return {**scored, "calls": session.calls}

    def _ask(self, call: str = "", **arguments: Any) -> Any:
        try:
            calls = [("prepare", self._start), *([(call, arguments)] if call else [])]
            return call_once(_MODULE, self._python, calls, self._timeout_s)
        except SideError as error:
            raise ConfigError(f"task.options.env={self._env} cannot be used: {error}") from error


def _result(playing: asyncio.Task[Any], session: GatewaySession) -> dict[str, Any]:
    """What the environment scored. SideError if it broke by itself: one that breaks, or goes on, when its calls or tokens
    are used up has earned nothing."""
    if playing.done() and (not session.over or playing.exception() is None):
        return dict(playing.result())
    why = playing.exception() if playing.done() else f"it went on for {_LEAVE_S:g} s after the model's last answer"
    log.info("a rollout whose calls or tokens were used up was not scored: %s", why)
    return {"reward": 0.0, "metrics": {}, "error": "", "malformed": False}
