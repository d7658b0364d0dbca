"""Whether a turn's text has come to contain a stop string, for engines that make their tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_SPARE_TOKENS = 8
"""Beyond one token for each byte of a stop string: for tokens without text."""


class StopText:
    """Ask after every token. Only the end of the text is decoded, for what lies before held no stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._window = max((len(stop.encode()) for stop in self._stops), default=0) + _SPARE_TOKENS

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest of the turn's tokens completes a stop string."""
        if not self._stops:
            return False
        text = self._decode(token_ids[-self._window :])
        return any(stop in text for stop in self._stops)
