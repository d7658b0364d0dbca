"""Which of this process's GPUs an LLM server gets, found out without torch."""

from __future__ import annotations

import os

from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm import gpus


def visible_gpus() -> list[str]:
    """Ids as the maker's variable wants them (``slurm.gpus``)."""
    return gpus.visible_gpus(os.environ).ids


def gpus_of_server(local_index: int, gpus_per_server: int) -> list[str]:
    """The GPUs of the ``local_index``-th server on this node; empty on a node without any."""
    visible = visible_gpus()
    if not visible:
        return []
    share = visible[local_index * gpus_per_server : (local_index + 1) * gpus_per_server]
    if len(share) < gpus_per_server:
        raise ConfigError(
            f"LLM server {local_index} of this node needs {gpus_per_server} GPU(s) (engine.tensor_parallel), but only "
            f"{len(visible)} are visible here: lower engine.servers_per_node or ask for more cluster.inference.gpus"
        )
    return share
