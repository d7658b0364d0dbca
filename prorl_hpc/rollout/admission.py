"""Whether more rollouts can be accepted now."""

from __future__ import annotations

from collections.abc import Collection

from prorl_hpc.core.policy_choice import PolicyChoice
from prorl_hpc.core.scheduler import Scheduler
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.rollout.agents import Agents

MAX_LIVE_ROLLOUTS = 200_000


class Admission:
    def __init__(self, scheduler: Scheduler, agents: Agents, choice: PolicyChoice) -> None:
        self._scheduler = scheduler
        self._agents = agents
        self._choice = choice

    def check(self, more: int, policies: Collection[str]) -> None:
        """Raise what ``why_not`` says."""
        refusal = self.why_not(more, policies)
        if refusal is not None:
            raise refusal

    def why_not(self, more: int, policies: Collection[str]) -> ServiceError | None:
        """429 when the queue would be too long, 503 when nobody is there who could do them; None: all is well."""
        live = self._scheduler.live
        if live + more > MAX_LIVE_ROLLOUTS:
            message = f"{live} rollouts are under way and {more} more would pass the limit of {MAX_LIVE_ROLLOUTS}"
            return ServiceError(f"{message}: try later", code="queue_full", status=429)
        if not self._agents.workers:
            return ServiceError("no worker has joined yet, or all are lost: try later", code="no_workers", status=503)
        served = self._scheduler.servers.policies
        wanted = {policy for ordered in policies for policy in self._choice.may_become(ordered)}
        for policy in sorted(wanted):
            if policy not in served:
                known = ", ".join(served) or "none"
                message = f"no LLM server of policy {policy!r} is there (policies served: {known}): try later"
                return ServiceError(message, code="no_servers", status=503)
        return None
