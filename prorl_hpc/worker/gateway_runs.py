"""RUN of tasks whose episodes call the policy over HTTP: a session at this worker's LLM gateway for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.sandbox.protocol import SandboxNeeds
from prorl_hpc.tasks.protocol import AgentHandler, GatewayAccess, GatewaySession, RolloutContext, wants_gateway
from prorl_hpc.worker.policies import Policy


class ClosableSession(GatewaySession, Protocol):
    async def close(self, finish: Finish = Finish.ENVIRONMENT) -> None: ...


OpenSession = Callable[..., ClosableSession]
"""gateway.server.Gateway.open_session."""


class Runs(Protocol):
    """How RUN is played, where that is not the handler's ``run`` alone."""

    def needs(self, needs: SandboxNeeds) -> SandboxNeeds:
        """Of the sandbox of INIT and RUN."""
        ...

    def check(self, handler: AgentHandler, spec: RolloutSpec) -> None:
        """ConfigError if the task cannot be played so."""
        ...

    async def run(self, handler: AgentHandler, context: RolloutContext, policy: Policy) -> None: ...


class GatewayRuns:
    """Implements Runs for handlers with ``wants_gateway``; others run as ever."""

    def __init__(self, max_turns: int, socket: Path, open_session: OpenSession, max_tokens: int = 0) -> None:
        """``socket``: where the gateway listens on this node. ``max_tokens``: agent.max_tokens."""
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._socket = socket
        self._open_session = open_session

    def needs(self, needs: SandboxNeeds) -> SandboxNeeds:
        return needs

    def check(self, handler: AgentHandler, spec: RolloutSpec) -> None:
        """Nothing to find."""

    async def run(self, handler: AgentHandler, context: RolloutContext, policy: Policy) -> None:
        if not wants_gateway(handler):
            await handler.run(context)
            return
        session = self._open_session(
            context,
            policy.chat,
            max_calls=self._max_turns,
            calls_setting="task.max_turns",
            tool_format=get_tool_format(policy.chat.tool_format),
            max_context_tokens=policy.max_context_tokens,
            max_tokens=self._max_tokens,
        )
        context.gateway = GatewayAccess(self._socket, session)
        try:
            await handler.run(context)
        finally:
            context.gateway = None
            await session.close()
