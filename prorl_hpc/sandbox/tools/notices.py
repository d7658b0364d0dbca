"""What was done to a sandbox as a whole, for the calls that ran then."""

from __future__ import annotations


class Notices:
    """In the order in which they came; ``len`` of them."""

    def __init__(self) -> None:
        self._all: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, cause: str, text: str) -> None:
        self._all.append((cause, text))

    def since(self, first: int) -> str:
        """A line for each cause: the last of its notices, and how many there were."""
        last: dict[str, str] = {}
        count: dict[str, int] = {}
        for cause, text in self._all[first:]:
            last[cause] = text
            count[cause] = count.get(cause, 0) + 1
        return "".join(f"[{text}{_times(count[cause])}]\n" for cause, text in last.items())


def _times(count: int) -> str:
    return f" (this is the last of {count} times)" if count > 1 else ""
