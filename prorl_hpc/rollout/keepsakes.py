"""What a coordinator that is started anew must know beside the orders: outside LLM servers, the newest weights, and
where it was to be found.

They hold for one job: a resumed run has other servers, and its trainer publishes anew.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate


class _Kept(msgspec.Struct):
    epoch: str
    outside: dict[str, OutsideServer] = {}
    weights: dict[str, WeightUpdate] = {}
    http_port: int = 0


class Keepsakes:
    """A small file of mode 0600, written whole at each change."""

    def __init__(self, path: Path, epoch: str) -> None:
        """``epoch`` names the job; what another job left is forgotten."""
        self._path = path
        kept = read_json(path, _Kept)
        self._kept = kept if kept is not None and kept.epoch == epoch else _Kept(epoch)

    @property
    def outside(self) -> dict[str, OutsideServer]:
        """Outside servers by id; not to be changed."""
        return self._kept.outside

    @property
    def weights(self) -> dict[str, WeightUpdate]:
        """The newest update of each policy; not to be changed."""
        return self._kept.weights

    @property
    def http_port(self) -> int:
        """The TCP port of the HTTP API; 0 if there was none yet."""
        return self._kept.http_port

    def listens(self, http_port: int) -> None:
        self._kept.http_port = http_port
        write_json(self._path, self._kept)

    def add_outside(self, server: OutsideServer) -> None:
        self._kept.outside[server.server_id] = server
        write_json(self._path, self._kept)

    def remove_outside(self, server_id: str) -> None:
        del self._kept.outside[server_id]
        write_json(self._path, self._kept)

    def published(self, update: WeightUpdate) -> None:
        self._kept.weights[update.policy] = update
        write_json(self._path, self._kept)
