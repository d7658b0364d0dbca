"""New weights of each policy to its LLM servers, remembered over a restart of the coordinator within an attempt."""

from __future__ import annotations

from collections.abc import Callable

from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.rollout.keepsakes import Keepsakes
from prorl_hpc.rollout.weights import WeightFanOut


class Publications:
    """One WeightFanOut per policy."""

    def __init__(
        self, send: Callable[[str, WeightUpdate], None], keepsakes: Keepsakes, *, first_server_s: float
    ) -> None:
        self._send = send
        self._keepsakes = keepsakes
        self._first_server_s = first_server_s
        self._of: dict[str, WeightFanOut] = {}

    async def publish(self, update: WeightUpdate) -> list[WeightUpdated]:
        """As WeightFanOut.publish."""
        fan_out = self._fan_out(update.policy)
        fan_out.take_up(update)
        self._keepsakes.published(update)
        return await fan_out.answers(update)

    def server_seen(self, policy: str, server_id: str, version: int, *, joined: bool) -> None:
        self._fan_out(policy).server_seen(server_id, version, joined=joined)

    def server_lost(self, policy: str, server_id: str) -> None:
        self._fan_out(policy).server_lost(server_id)

    def answered(self, policy: str, answer: WeightUpdated) -> None:
        self._fan_out(policy).answered(answer)

    def close(self) -> None:
        for fan_out in self._of.values():
            fan_out.close()

    def _fan_out(self, policy: str) -> WeightFanOut:
        if policy not in self._of:
            newest = self._keepsakes.weights.get(policy)
            self._of[policy] = WeightFanOut(self._send, first_server_s=self._first_server_s, newest=newest)
        return self._of[policy]
