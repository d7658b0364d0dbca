"""``trainer.publish=direct``: every process of every LLM server reads the weights from the trainer itself, and nothing is
written anywhere.

Rank 0 keeps what it has offered in the memory of its node: training goes on meanwhile, and a server that comes late, or
starts anew, asks for it hours later.
"""

from __future__ import annotations

from pathlib import Path

from prorl_hpc.messages.inference import WeightProbe, WeightSource, WeightUpdate
from prorl_hpc.trainer.crew import Crew
from prorl_hpc.trainer.direct_copy import offered
from prorl_hpc.transport.weight_server import WeightServer
from prorl_hpc.transport.weight_stream import read_key


class DirectPublisher:
    """See Publisher. Listens on address ``host``; ``secret``: the run's file that both sides prove to have read."""

    def __init__(self, crew: Crew, host: str, secret: Path) -> None:
        self._crew = crew
        self._server = WeightServer(host, read_key(secret))
        self._offers: list[WeightSource] = []

    async def offer(self, version: int, probe: WeightProbe) -> WeightUpdate:
        source = self._server.offer([offered(name, tensor) for name, tensor in await self._crew.copy_weights()])
        self._offers.append(source)
        return WeightUpdate(version, [], probe, source=source)

    def delivered(self) -> None:
        for old in self._offers[:-1]:
            self._server.withdraw(old)
        del self._offers[:-1]

    def close(self) -> None:
        self._server.close()
