"""What ``edit`` changed, so that it can be undone: per file, newest first, in bounded memory."""

from __future__ import annotations

import hashlib

BUDGET_BYTES = 16 << 20
"""Of all files together; the oldest changes are forgotten first."""
_OVERHEAD_BYTES = 400


class Change:
    """One edit of one file: what to put in place of what, and how to know that nothing else happened since."""

    def __init__(self, path: str, before: bytes | None, after: bytes) -> None:
        """``before`` None: the edit made the file."""
        self.path = path
        self.made_the_file = before is None
        was = before or b""
        self._start = common_prefix(was, after)
        rest, rest_after = was[self._start :], after[self._start :]
        end = common_prefix(rest[::-1], rest_after[::-1])
        self._removed = rest[: len(rest) - end]
        self._added_bytes = len(rest_after) - end
        self._after = _digest(after)

    @property
    def held_bytes(self) -> int:
        return len(self._removed) + _OVERHEAD_BYTES

    def left(self, content: bytes) -> bool:
        """Whether this is the content that the edit left."""
        return _digest(content) == self._after

    def undone(self, content: bytes) -> tuple[bytes, int, int]:
        """The content before the edit, and the part of it (start, end) that comes back."""
        rest = content[self._start + self._added_bytes :]
        return content[: self._start] + self._removed + rest, self._start, self._start + len(self._removed)


class History:
    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._changes: list[Change] = []
        self._held_bytes = 0

    def record(self, change: Change) -> None:
        self._changes.append(change)
        self._held_bytes += change.held_bytes
        while self._held_bytes > self._budget_bytes:
            self._held_bytes -= self._changes.pop(0).held_bytes

    def last(self, path: str) -> Change | None:
        return next((change for change in reversed(self._changes) if change.path == path), None)

    def forget(self, change: Change) -> None:
        self._changes.remove(change)
        self._held_bytes -= change.held_bytes


def common_prefix(one: bytes, other: bytes) -> int:
    """How many bytes at the start are the same; by halves, as a loop over bytes is slow."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
