"""RUN of an outside agent: a session at this worker's LLM gateway, and the program in the sandbox."""

from __future__ import annotations

from pathlib import Path

from prorl_hpc.agents.outside import OutsideAgent, instruction_of
from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.config.schema import AgentConfig
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.sandbox.protocol import SandboxNeeds
from prorl_hpc.tasks.protocol import AgentHandler, RolloutContext, collect
from prorl_hpc.worker.gateway_runs import OpenSession
from prorl_hpc.worker.policies import Policy


class OutsideRuns:
    """Plays rollouts with the program of group ``agent``. ``socket``: where the gateway listens on this node."""

    def __init__(self, config: AgentConfig, socket: Path, open_session: OpenSession) -> None:
        self._agent = OutsideAgent(config)
        self._max_calls = config.max_calls
        self._max_tokens = config.max_tokens
        self._socket = socket
        self._open_session = open_session

    def needs(self, needs: SandboxNeeds) -> SandboxNeeds:
        """Of the sandbox of INIT and RUN."""
        return self._agent.needs(needs, str(self._socket))

    def check(self, handler: AgentHandler, spec: RolloutSpec) -> None:
        """ConfigError if the task cannot be told to a program."""
        instruction_of(handler, spec.task, spec.row)

    async def run(self, handler: AgentHandler, context: RolloutContext, policy: Policy) -> None:
        """In place of ``handler.run``; leaves the outcome in the context's notes. Raises AgentError, SandboxError,
        InferenceError."""
        instruction = instruction_of(handler, context.spec.task, context.spec.row)
        session = self._open_session(
            context,
            policy.chat,
            max_calls=self._max_calls,
            tool_format=get_tool_format(policy.chat.tool_format),
            max_context_tokens=policy.max_context_tokens,
            max_tokens=self._max_tokens,
        )
        finish = Finish.ENVIRONMENT
        try:
            outcome = await self._agent.run(context.sandbox, instruction, session, model=context.spec.policy)
            if outcome.answer is not None:
                finish = Finish.ANSWER
        finally:
            await session.close(finish)
        context.notes["outcome"] = outcome
        await collect(handler, context)
