"""The attempts of a run as a person sees them. How one really ended is known once the next has begun: one without a
record that has a successor was cut off, one that was suspended and has a successor went on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.reading import read_tolerantly

CUT_OFF, NEVER_BEGAN, SUSPENDED = "cut off", "never began", "suspended"
_OVER_SUDDENLY = "without a last word: its job was killed, or the node of its launcher was lost"


class EndRecord(msgspec.Struct, frozen=True):
    """Of ``ending.json`` what people are shown."""

    ending: str
    reason: str = ""
    time: float = 0.0
    job: str = ""
    exit_code: int = 0
    goes_on: bool = False
    steps: int = -1
    rollouts: int = -1
    lost_nodes: list[str] = []


class _Host(msgspec.Struct, frozen=True):
    rank: int
    host: str


class _Process(msgspec.Struct, frozen=True):
    name: str


class _Node(msgspec.Struct, frozen=True):
    processes: list[_Process]


class _Component(msgspec.Struct, frozen=True):
    nodes: list[_Node]


class _Plan(msgspec.Struct, frozen=True):
    components: list[_Component]


@dataclass(frozen=True)
class LostNode:
    """A node that the launcher has given up, and what ran there."""

    host: str
    processes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AttemptStory:
    """``ending``: finished, stopped, suspended, failed, cut off, never began; empty while it runs or waits. ``then``:
    "went on" if another one followed, "goes on" if that is to come by itself. ``begun``, ``ended``: seconds since the
    epoch."""

    number: int
    begun: float | None
    ended: float | None
    ending: str
    reason: str
    then: str
    record: EndRecord | None
    lost_nodes: list[str]

    @property
    def seconds(self) -> float | None:
        return None if self.begun is None or self.ended is None else max(0.0, self.ended - self.begun)

    @property
    def how(self) -> str:
        """In a few words: ``suspended, went on``."""
        return f"{self.ending}, {self.then}" if self.then else self.ending

    @property
    def as_json(self) -> dict[str, Any]:
        """The keys are documented in prorl_hpc.cli.status."""
        record = self.record
        return {
            "attempt": self.number,
            "begun": self.begun,
            "ended": self.ended,
            "seconds": self.seconds,
            "ending": self.ending or None,
            "reason": self.reason,
            "goes_on": bool(self.then),
            "job": record.job if record else "",
            "exit_code": record and record.exit_code,
            "steps": record.steps if record else None,
            "rollouts": record.rollouts if record else None,
            "lost_nodes": self.lost_nodes,
        }


def attempt_stories(run: RunDirectory, *, living: bool) -> list[AttemptStory]:
    """Oldest first. ``living``: the newest runs or will run."""
    attempts = run.all_attempts()
    return [_story(one, one is attempts[-1], living) for one in attempts]


def lost_nodes(run: RunDirectory) -> list[LostNode]:
    """That this attempt has lost so far: the launcher marks them in ``state/``."""
    ranks = sorted(
        int(number) for mark in run.state.glob("node-*.lost") if (number := mark.stem.partition("-")[2]).isdecimal()
    )
    if not ranks:
        return []
    hosts = {placed.rank: placed.host for placed in read_tolerantly(run.placement_file, list[_Host]) or []}
    plan = read_tolerantly(run.plan_file, _Plan)
    nodes = [node for component in plan.components for node in component.nodes] if plan is not None else []
    return [
        LostNode(hosts.get(rank, f"node {rank}"), [p.name for p in nodes[rank].processes] if rank < len(nodes) else [])
        for rank in ranks
    ]


def _story(run: RunDirectory, newest: bool, living: bool) -> AttemptStory:
    record, begun = read_tolerantly(run.ending_file, EndRecord), _changed(run.placement_file)
    lost = list(dict.fromkeys([*(record.lost_nodes if record else []), *(node.host for node in lost_nodes(run))]))
    if record is not None:
        later = "goes on" if record.goes_on and living else ""
        then = (later if newest else "went on") if record.ending == SUSPENDED else ""
        return AttemptStory(run.attempt, begun, record.time, record.ending, record.reason, then, record, lost)
    if newest and living:
        return AttemptStory(run.attempt, begun, None, "", "", "", None, lost)
    if begun is None:
        return AttemptStory(run.attempt, None, None, NEVER_BEGAN, "its job was gone before it began", "", None, lost)
    then = "" if newest else "went on"
    return AttemptStory(run.attempt, begun, _last_sign(run), CUT_OFF, _OVER_SUDDENLY, then, None, lost)


def _last_sign(run: RunDirectory) -> float | None:
    """When something of the attempt was last heard of: its launcher and its processes write while they live. The order to
    stop is left out, for the next attempt writes one."""
    times = [_changed(path) for path in run.state.glob("*") if path.name != run.stop_marker.name]
    return max((time for time in times if time is not None), default=None)


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
