"""A command's output, bounded, and as text."""

from __future__ import annotations

import re

READ_BYTES = 65536
_NOT_TEXT = re.compile(
    # One character class first, so that the search for it is a fast one.
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
    r"(?:(?<=\x1b)(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~]))?"
)
_CONTROLS = bytes(byte for byte in range(128) if _NOT_TEXT.match(chr(byte)))


class BoundedOutput:
    """The first and the last bytes of a stream: at most ``limit`` of them, whatever comes."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_room + READ_BYTES:
            self._trim()

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_room
        if excess > 0:
            self._dropped += excess
            del self._tail[:excess]

    def text(self, strip_ansi: bool = True) -> str:
        """As UTF-8, what is invalid replaced; without terminal control sequences if ``strip_ansi``."""
        self._trim()
        if not self._dropped:
            return _text(self._head + self._tail, strip_ansi)
        mark = f"\n[... {self._dropped} bytes of output left out here ...]\n"
        return _text(self._head, strip_ansi) + mark + _text(self._tail, strip_ansi)


def _text(data: bytearray, strip_ansi: bool) -> str:
    text = data.decode("utf-8", "replace")
    if not strip_ansi or len(data.translate(None, _CONTROLS)) == len(data):
        return text
    return _NOT_TEXT.sub("", text)
