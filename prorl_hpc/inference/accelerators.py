"""Which GPUs this process may use, found out without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from prorl_hpc.messages.errors import ConfigError


def visible_gpus() -> list[str]:
    """Ids as CUDA_VISIBLE_DEVICES wants them; that variable (Slurm sets it) wins over the device files."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu.strip() for gpu in listed.split(",") if gpu.strip() not in ("", "-1", "NoDevFiles")]
    numbers = [m.group(1) for p in Path("/dev").glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", p.name))]
    return sorted(numbers, key=int)


def gpus_of_server(local_index: int, gpus_per_server: int) -> list[str]:
    """The GPUs of the ``local_index``-th server on this node; empty on a node without any."""
    gpus = visible_gpus()
    if not gpus:
        return []
    share = gpus[local_index * gpus_per_server : (local_index + 1) * gpus_per_server]
    if len(share) < gpus_per_server:
        raise ConfigError(
            f"LLM server {local_index} of this node needs {gpus_per_server} GPU(s) (engine.tensor_parallel), but only "
            f"{len(gpus)} are visible here: lower engine.servers_per_node or ask for more cluster.inference.gpus"
        )
    return share
