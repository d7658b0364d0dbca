"""Which policy a rollout is for, where its order leaves that open.

The choice is a pure function of the seed and the name of the group: all samples of a group, all attempts of a rollout and
all processes that ever ask agree, and nothing has to be remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

ANY = "any"
"""What an order names as its policy that may get any."""
_DEFAULT = "policy"
_NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


class PolicyChoice:
    """``names``: the policies of the run. ``weights``: their shares, of any sum; those left out get none. Without weights
    all shares are equal. Raises ValueError for weights of others, negative ones, and if nobody gets a share."""

    def __init__(
        self, names: Iterable[str] = (_DEFAULT,), weights: Mapping[str, float] = _NO_WEIGHTS, seed: int = 0
    ) -> None:
        self.names = tuple(names)
        given = weights or dict.fromkeys(self.names, 1.0)
        if unknown := sorted(set(given) - set(self.names)):
            raise ValueError(f"there is no policy {unknown[0]!r}: there are {', '.join(self.names)}")
        total = sum(given.values())
        if min(given.values()) < 0 or not 0 < total < float("inf"):
            raise ValueError(f"weights {dict(given)}: must be 0 or more, one of them greater than 0")
        # sorted: the order in which a configuration names them decides nothing
        self._shares = [(name, given[name] / total) for name in sorted(given) if given[name] > 0]
        self._seed = seed

    @property
    def drawn(self) -> list[str]:
        """The policies that ``any`` may become."""
        return [name for name, _ in self._shares]

    def may_become(self, policy: str) -> Collection[str]:
        """The policies that rollouts ordered for ``policy`` may be for."""
        return self.drawn if policy == ANY else (policy,)

    def resolve(self, policy: str, key: str) -> str:
        """``policy`` itself, or for ``any`` the one that is drawn for ``key``, which names a group."""
        return self._draw(key) if policy == ANY else policy

    def _draw(self, key: str) -> str:
        digest = hashlib.blake2b(f"{self._seed}/{key}".encode(), digest_size=8).digest()
        left = int.from_bytes(digest, "big") / 2**64
        for name, share in self._shares:
            left -= share
            if left < 0:
                return name
        return self._shares[-1][0]  # the shares add up to a hair less than 1
