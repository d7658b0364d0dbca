"""Which prompt tokens an engine need not read again: whole blocks of token prefixes, least recently used out first.

The same rules as vLLM's automatic prefix caching: a block is known by its tokens and by all before it, only full blocks
are kept, and the last token of a prompt is always computed, so that there is something to sample from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class PrefixCache:
    """Holds ``capacity_tokens``, in blocks of ``block_size``."""

    def __init__(self, capacity_tokens: int, block_size: int) -> None:
        self._blocks = capacity_tokens // block_size
        self._block_size = block_size
        self._kept: OrderedDict[int, None] = OrderedDict()
        """The least recently used first."""
        self._generation = 0

    @property
    def generation(self) -> int:
        """Counts ``forget``."""
        return self._generation

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of the prompt's first tokens are there; they count as used now."""
        if not self._kept:
            return 0
        found: list[int] = []
        for key in self._keys(token_ids[:-1]):
            if key not in self._kept:
                break
            found.append(key)
        self._use(found)
        return len(found) * self._block_size

    def keep(self, token_ids: Sequence[int], generation: int) -> None:
        """What was computed, prompt and answer; nothing if all was forgotten since ``generation``."""
        if self._blocks and generation == self._generation:
            self._use(list(self._keys(token_ids)))

    def forget(self) -> None:
        """For new weights: requests under way leave nothing behind either."""
        self._kept.clear()
        self._generation += 1

    def _use(self, keys: list[int]) -> None:
        for key in reversed(keys):  # a prefix stays longer than what hangs on it
            self._kept[key] = None
            self._kept.move_to_end(key)
        while len(self._kept) > self._blocks:
            self._kept.popitem(last=False)

    def _keys(self, token_ids: Sequence[int]) -> Iterator[int]:
        key = 0
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            key = hash((key, *token_ids[end - self._block_size : end]))
            yield key
