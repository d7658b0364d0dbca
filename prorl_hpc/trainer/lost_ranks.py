"""What a rank does that has lost the connection to another one.

It hears of that first, and knows least: whether a process died or a node was lost is for that node's supervisor, or Slurm, to say.
Ending at once, it would be taken for the cause: the run would have failed, where after the loss of a node it goes on.
"""

from __future__ import annotations

import logging
import time

import torch.distributed as dist

from prorl_hpc.messages.status import Phase
from prorl_hpc.observe.process import Process
from prorl_hpc.trainer.stopping import StopSignal

log = logging.getLogger(__name__)
WAIT_S = 360.0
"""Slurm gives a node up that has been silent for SlurmdTimeout: 300 s, unless the site says otherwise."""


def another_is_lost(error: BaseException) -> bool:
    """Whether ``error`` is that of a collective whose other side has gone. Gloo has no class of its own for it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def told_to_end(process: Process, stop: StopSignal, error: BaseException) -> bool:
    """Wait until this process is told to end, as all are once somebody has said what happened; False if nobody does."""
    log.error("another trainer rank is gone, and this one waits up to %.0f s to be told to end: %s", WAIT_S, error)
    process.say(Phase.READY, "another trainer rank is gone: waits to be told why")
    deadline = time.monotonic() + WAIT_S
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.1)
    return stop.requested
