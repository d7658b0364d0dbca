"""The copy of the weights that ``trainer.publish=direct`` offers while training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from prorl_hpc.messages.errors import RunError
from prorl_hpc.transport.weight_server import OfferedTensor
from prorl_hpc.transport.weight_stream import StreamedTensor


def copies(weights: Iterable[tuple[str, Tensor]], *, keep: bool) -> list[tuple[str, Tensor]]:
    """Of all ``weights``, which may be collective, in the memory of the CPU. A rank that is not to ``keep`` them only walks
    through. Raises RunError if there is no room, after the walk, for the other ranks go on with it."""
    walk = iter(weights)
    kept = []
    for name, tensor in walk:
        if not keep:
            continue
        try:
            kept.append((name, tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)))
        except (MemoryError, RuntimeError) as error:
            deque(walk, maxlen=0)
            raise RunError(
                f"no room for a copy of the weights in the memory of the trainer's first node, at {name}: {error}. "
                "trainer.publish=direct keeps up to two; set trainer.publish=disk"
            ) from error
    return kept


def offered(name: str, tensor: Tensor) -> OfferedTensor:
    """``tensor``: contiguous, on the CPU, and not changed any more."""
    about = StreamedTensor(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes)
    return OfferedTensor(about, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
