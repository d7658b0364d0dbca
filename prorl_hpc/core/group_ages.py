"""Which group came first, for as long as one of its rollouts lives."""

from __future__ import annotations


class GroupAges:
    """Ages are the numbers of the groups' first rollouts; a rollout without a group is a group of its own."""

    def __init__(self) -> None:
        self._groups: dict[str, list[int]] = {}

    def join(self, group_id: str, number: int) -> int:
        """A rollout of the group starts its life; returns the group's age."""
        if not group_id:
            return number
        entry = self._groups.setdefault(group_id, [number, 0])
        entry[1] += 1
        return entry[0]

    def leave(self, group_id: str) -> None:
        """A rollout of the group has ended."""
        entry = self._groups.get(group_id)
        if entry is not None:
            entry[1] -= 1
            if entry[1] == 0:
                del self._groups[group_id]
