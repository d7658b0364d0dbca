"""Whether a model goes round in circles."""

from __future__ import annotations

from dataclasses import dataclass

MIN_CHARS = 120
"""Repeated text shorter than this is style: a rule of dashes, a row of a table."""
_TAIL_CHARS = 4000


def ends_in_repetition(text: str, times: int, min_chars: int = MIN_CHARS) -> bool:
    """Whether ``text`` ends with one piece of text ``times`` times in a row or more, ``min_chars`` long in all. Looks at
    its last 4,000 characters.

    The smallest period of each suffix is its length minus its longest border (Knuth, Morris and Pratt's failure
    function, of the reversed text)."""
    tail = text[-_TAIL_CHARS:][::-1]
    border = [0] * len(tail)
    for i in range(1, len(tail)):
        k = border[i - 1]
        while k and tail[i] != tail[k]:
            k = border[k - 1]
        k += tail[i] == tail[k]
        border[i] = k
        length = i + 1
        if k and length >= min_chars and length >= times * (length - k):
            return True
    return False


@dataclass
class SameAgain:
    """Counts turns in a row that did the same with the same result."""

    limit: int
    """Turns in a row that are too many; 0: none are."""
    _last: object = None
    _count: int = 0

    def add(self, turn: object) -> bool:
        """Whether ``turn``, comparable by ``==``, makes it too many."""
        self._count = self._count + 1 if turn == self._last else 1
        self._last = turn
        return bool(self.limit) and self._count >= self.limit
