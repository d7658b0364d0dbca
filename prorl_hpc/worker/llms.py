"""What a worker asks of its LLM servers (implemented by inference.client)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prorl_hpc.messages.control import ServerRef
from prorl_hpc.tasks.protocol import LLM


class MovableLLM(LLM, Protocol):
    """A rollout's LLM, which can be told to go on at another server."""

    def move(self, server: ServerRef | None) -> None:
        """``None``: there is no other server; what waits for an answer fails with InferenceError."""
        ...


class LLMSource(Protocol):
    """Gives each rollout its LLM (inference.client.LLMClient)."""

    def for_rollout(
        self, server: ServerRef, rollout_id: str, priority: int, trouble: Callable[[str, str], None] | None
    ) -> MovableLLM:
        """``trouble(server_id, message)`` is called when the server does not answer; it is answered by ``move``.
        None: that is an InferenceError at once. TransportError if ``server`` cannot be reached from here."""
        ...
