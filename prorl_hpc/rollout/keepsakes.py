"""What a coordinator that is started anew must know beside the orders: outside LLM servers, the newest weights, and
where it was to be found.

Weights hold for one attempt of the run: in the next one the engines start without them, and the trainer publishes those
of its checkpoint, which may be older. All else goes on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate


class _Kept(msgspec.Struct):
    epoch: str
    attempt: int = 0
    outside: dict[str, OutsideServer] = {}
    weights: dict[str, WeightUpdate] = {}
    published: set[str] = set()
    http_port: int = 0


class Keepsakes:
    """A small file of mode 0600, written whole at each change."""

    def __init__(self, path: Path, epoch: str, attempt: int = 1, *, own_trainer: bool = True) -> None:
        """``epoch`` and ``attempt`` of the run. Not ``own_trainer``: who publishes is no process of the run and does not
        start anew with it, so weights go on too."""
        self._path = path
        kept = self._kept = read_json(path, _Kept) or _Kept(epoch)
        if kept.epoch != epoch:
            kept.weights, kept.published = {}, set()
        elif kept.attempt != attempt and own_trainer:
            kept.published |= kept.weights.keys()
            kept.weights = {}
        kept.epoch, kept.attempt = epoch, attempt

    @property
    def outside(self) -> dict[str, OutsideServer]:
        """Outside servers by id; not to be changed."""
        return self._kept.outside

    @property
    def weights(self) -> dict[str, WeightUpdate]:
        """The newest update of each policy; not to be changed."""
        return self._kept.weights

    @property
    def awaited(self) -> set[str]:
        """Policies whose weights were published in an earlier attempt, and not in this one yet."""
        return self._kept.published - self._kept.weights.keys()

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
