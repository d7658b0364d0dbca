"""The ways on which new weights leave the trainer: ``trainer.publish``."""

from __future__ import annotations

from typing import Protocol

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate
from prorl_hpc.trainer.crew import Crew
from prorl_hpc.trainer.direct_transfer import DirectPublisher
from prorl_hpc.trainer.publish import WeightDirectory


class Publisher(Protocol):
    """Of rank 0. An offer stands until the next one is delivered: a server that comes late or starts anew takes it too."""

    async def offer(self, version: int, probe: WeightProbe) -> WeightUpdate:
        """Make the weights that the trainer has now available as ``version``; what the servers are to be told of it. All
        ranks take part. Once it returns, the trainer may go on changing its weights."""
        ...

    def delivered(self) -> None:
        """The servers that are there have what was offered last: older weights may go."""
        ...

    def close(self) -> None:
        """No server will ask any more."""
        ...


class DiskPublisher:
    """safetensors files that every server reads."""

    def __init__(self, crew: Crew, directory: WeightDirectory) -> None:
        self._crew, self._directory = crew, directory

    async def offer(self, version: int, probe: WeightProbe) -> WeightUpdate:
        paths = await self._directory.write(version, self._crew.write_weights)
        return WeightUpdate(version, [str(path) for path in paths], probe)

    def delivered(self) -> None:
        self._directory.remove_older()

    def close(self) -> None:
        self._directory.close()


def make_publisher(
    way: str, crew: Crew, run: RunDirectory, *, host: str, single_node: bool, weight_bytes: int
) -> Publisher:
    """Of ``trainer.publish=way``. ``host``: the address at which the run's other nodes reach this one, loopback where there
    are none."""
    if way == "direct":
        return DirectPublisher(crew, host, run.weight_secret_file)
    return DiskPublisher(crew, WeightDirectory(run, single_node=single_node, weight_bytes=weight_bytes))
