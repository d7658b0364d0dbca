"""Weights as they come from the trainer: one tensor after the other, in the memory of the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from prorl_hpc.messages.inference import WeightSource
from prorl_hpc.transport.weight_stream import StreamedTensor, open_stream, read_key

log = logging.getLogger(__name__)

TRIES = 4
"""For a stream that breaks off and brings no further tensor meanwhile."""
RETRY_S = 1.0


def streamed_tensors(source: WeightSource, key_file: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, CPU tensor) pairs of the whole model. A stream that breaks off is taken up again where it was.
    OSError if that does not help, StreamRefused if the source offers other weights by now."""
    key = read_key(key_file)
    done, failures = 0, 0
    while True:
        try:
            with open_stream(source, key, first=done) as incoming:
                for about in incoming.tensors[done:]:
                    tensor = empty_tensor(about)
                    incoming.read(bytes_of(tensor))
                    done, failures = done + 1, 0
                    yield about.name, tensor
                return
        except OSError as error:
            failures += 1
            if failures == TRIES:
                raise
            log.warning("the weight stream broke off after %d tensors, asking again: %s", done, error)
            time.sleep(RETRY_S)


def empty_tensor(about: StreamedTensor) -> Tensor:
    """ValueError if its size does not fit its dtype and shape."""
    tensor = torch.empty(about.shape, dtype=getattr(torch, about.dtype))
    if tensor.nbytes != about.size:
        raise ValueError(f"{about.name} is announced with {about.size} bytes, but {about} has {tensor.nbytes}")
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
