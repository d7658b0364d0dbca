"""The order of training prompts: endless, shuffled anew each epoch, known from seed and cursor alone."""

from __future__ import annotations

import random
from typing import Any

Row = dict[str, Any]


class PromptOrder:
    """Row number ``cursor`` of the endless sequence of shuffled epochs is always the same for one seed."""

    def __init__(self, rows: list[Row], seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def take(self, cursor: int, count: int) -> list[Row]:
        """Rows ``cursor`` … ``cursor + count - 1``."""
        return [self._row(number) for number in range(cursor, cursor + count)]

    def _row(self, number: int) -> Row:
        epoch, place = divmod(number, len(self._rows))
        if epoch != self._epoch:
            self._order = list(range(len(self._rows)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._rows[self._order[place]]
