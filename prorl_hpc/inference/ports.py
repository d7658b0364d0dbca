"""TCP ports for what runs inside one LLM server, which no other server of this node takes, of whatever run."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from prorl_hpc.messages.errors import InferenceError

BLOCK = 32
_LOWEST = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortBlock:
    """``BLOCK`` ports from ``first`` on, below those that the system gives to anybody. Its last one is held open as the
    claim to all of them, for whoever chooses a block tries that port first; ``close`` gives them back."""

    def __init__(self, first: int, claim: socket.socket) -> None:
        self.first = first
        self._claim = claim

    @classmethod
    def claim(cls) -> PortBlock:
        """InferenceError if none is free."""
        highest = _ephemeral_start()
        blocks = range(_LOWEST, highest - BLOCK, BLOCK)
        begin = os.getpid() % len(blocks)
        for first in (*blocks[begin:], *blocks[:begin]):
            claim = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                claim.bind(("", first + BLOCK - 1))
                claim.listen(1)
            except OSError:
                claim.close()
                continue
            return cls(first, claim)
        raise InferenceError(f"no {BLOCK} TCP ports in a row are free between {_LOWEST} and {highest} on this node")

    def close(self) -> None:
        self._claim.close()


def _ephemeral_start() -> int:
    with contextlib.suppress(OSError, ValueError):
        start = int(_EPHEMERAL.read_text().split()[0])
        if start > _LOWEST + 16 * BLOCK:
            return start
    return 32_768
