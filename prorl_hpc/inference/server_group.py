"""One vLLM server over several nodes: a leader, which has the engine and its door, and a headless member on each further
node. They find one another by files in the run's ``state/``.

Every start of the server is a generation of its own: the leader announces it, the members join it, and the death of any
of them ends it for all.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from prorl_hpc.messages.codec import read_json, write_json


class Announcement(msgspec.Struct, frozen=True):
    """Where the members of ``generation`` meet: vLLM's --master-addr and --master-port."""

    generation: str
    address: str
    port: int


class MemberReport(msgspec.Struct, frozen=True):
    """A member's last word. ``beat`` grows while it lives; ``words``: how it died, empty while it has not."""

    generation: str
    beat: int
    words: str = ""


@dataclass(frozen=True)
class ServerGroup:
    """``leader``: its process's name. ``nodes`` in all."""

    state: Path
    leader: str
    nodes: int

    @property
    def _announcement(self) -> Path:
        return self.state / f"{self.leader}.group"

    def _report(self, rank: int) -> Path:
        return self.state / f"{self.leader}.member-{rank}"

    def announce(self, address: str, port: int) -> Announcement:
        """The leader begins a new generation."""
        announcement = Announcement(secrets.token_hex(8), address, port)
        write_json(self._announcement, announcement)
        return announcement

    def withdraw(self) -> None:
        """There is no server now."""
        self._announcement.unlink(missing_ok=True)

    def announced(self) -> Announcement | None:
        return read_json(self._announcement, Announcement)

    def report(self, rank: int, report: MemberReport) -> None:
        write_json(self._report(rank), report)

    def reports(self, generation: str) -> dict[int, MemberReport]:
        """Rank → the report of each member that has joined this generation."""
        read = {rank: read_json(self._report(rank), MemberReport) for rank in range(1, self.nodes)}
        return {rank: told for rank, told in read.items() if told is not None and told.generation == generation}


@dataclass
class MemberWatch:
    """Who of a generation has died: by its own word, or by saying nothing for ``lost_after_s``, told by this node's
    clock."""

    lost_after_s: float
    _heard: dict[int, tuple[int, float]] = field(default_factory=dict)

    def dead(self, reports: dict[int, MemberReport], now: float | None = None) -> str:
        """For people; empty while all that have joined live."""
        now = time.monotonic() if now is None else now
        for rank, report in sorted(reports.items()):
            if report.words:
                return f"its member on node {rank + 1} is dead: {report.words}"
            beat, since = self._heard.get(rank, (-1, now))
            if report.beat != beat:
                self._heard[rank] = report.beat, now
            elif now - since > self.lost_after_s:
                return f"its member on node {rank + 1} has said nothing for {now - since:.0f} s (rollout.lost_after_s)"
        return ""
