"""Rollouts that wait for INIT: who goes first.

Lower priority numbers go first. Clients of one priority get equal shares by start-time fair queuing (Goyal, Vin,
Cheng 1996): each rollout gets a start tag, the later of the virtual time and its client's last tag + 1, and the
smallest tag goes first; virtual time is the tag of whoever went last. All samples of a group have the tag of its
first, so that groups are finished rather than begun. What was refused a place or has to start again keeps its tag,
and so comes before what is younger: nothing starves within a priority.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from prorl_hpc.core.life import Life, Rank
from prorl_hpc.messages.rollout import RolloutSpec, Status

_CLIENTS_KEPT = 1000


class WaitingLine:
    """One queue per policy; the policies share the ranks."""

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[Rank, int, Life]]] = {}
        self._numbers = itertools.count()
        self._groups: dict[str, list[int]] = {}
        """Group → [its first tag, its first number, samples that live]."""
        self._virtual = 0
        self._last_tags: dict[str, int] = {}

    def rank(self, spec: RolloutSpec) -> Rank:
        """For a rollout that starts its life; ``left`` when it ends."""
        number = next(self._numbers)
        tag = max(self._virtual, self._last_tags.get(spec.client, -1) + 1)
        self._last_tags[spec.client] = tag
        if len(self._last_tags) > _CLIENTS_KEPT:
            self._last_tags = {client: last for client, last in self._last_tags.items() if last >= self._virtual}
        if not spec.group_id:
            return (spec.priority, tag, number, number)
        group = self._groups.setdefault(spec.group_id, [tag, number, 0])
        group[2] += 1
        return (spec.priority, group[0], group[1], number)

    def left(self, spec: RolloutSpec) -> None:
        """A rollout's life has ended."""
        group = self._groups.get(spec.group_id)
        if group is not None:
            group[2] -= 1
            if group[2] == 0:
                del self._groups[spec.group_id]

    def push(self, life: Life) -> None:
        heapq.heappush(self._queues.setdefault(life.spec.policy, []), (life.rank, life.attempt, life))

    def pop(self, admitted: Callable[[str], bool]) -> Life | None:
        """Take out the first one whose policy is ``admitted``; None if there is none."""
        best = None
        for policy, queue in self._queues.items():
            while queue and not (queue[0][2].status is Status.QUEUED and queue[0][2].attempt == queue[0][1]):
                heapq.heappop(queue)
            if queue and (best is None or queue[0][0] < best[0][0]) and admitted(policy):
                best = queue
        if best is None:
            return None
        rank, _, life = heapq.heappop(best)
        self._virtual = max(self._virtual, rank[1])
        return life
