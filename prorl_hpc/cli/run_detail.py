"""One run in full: its display, its attempts and how they ended, how its processes ended, where it stands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prorl_hpc.cli.run_list import STYLE
from prorl_hpc.cli.run_rows import RunRow
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.observe.attempts import AttemptStory, attempt_stories
from prorl_hpc.observe.display import render
from prorl_hpc.observe.snapshot import Snapshot, SnapshotReader
from prorl_hpc.observe.wording import clock
from prorl_hpc.slurm.endings import AttemptEnding, NodeEnd, ProcessEnd, read_ending
from prorl_hpc.slurm.failure import RunFailure, read_failure
from prorl_hpc.slurm.run_states import RunState

_SHOWN_ATTEMPTS = 8
_SHOWN_ENDS = 12


def process_ends(run: RunDirectory) -> list[ProcessEnd]:
    """How the newest attempt's processes ended: from its ending, else from the nodes that are done already."""
    ending = _readable_ending(run)
    if ending is not None:
        return ending.processes
    return [end for node in node_ends(run) for end in node.processes]


def node_ends(run: RunDirectory) -> list[NodeEnd]:
    found = []
    for file in sorted(run.state.glob("node-*.ended")):
        try:
            found.append(msgspec.json.decode(file.read_bytes(), type=NodeEnd))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def detail_view(run: RunDirectory, state: RunState) -> RenderableType:
    """What ``status RUN`` shows."""
    snapshot = replace(SnapshotReader(run).read(), gone=not state.living)
    parts: list[RenderableType] = [render(run.run_id, snapshot, elapsed_s(run, state)), state_line(run, state)]
    attempts = attempt_stories(run, living=state.living)
    if len(attempts) > 1 or any(attempt.ending or attempt.lost_nodes for attempt in attempts):
        parts.append(_attempt_table(attempts))
    if ends := process_ends(run):
        parts.append(_end_table(ends))
    left = [f"left on {node.node}: {'; '.join(node.left)}" for node in node_ends(run) if node.left]
    parts += [Text(line, style="red") for line in left]
    if (failure := readable_failure(run)) is not None:
        parts.append(Text(str(failure)))
    return Group(*parts)


def elapsed_s(run: RunDirectory, state: RunState) -> float:
    """Since the job was submitted: until now, or until its last attempt ended."""
    if state.job is None:
        return 0.0
    submitted, stories = state.job.record.submitted, attempt_stories(run, living=state.living)
    until = time.time() if state.living or not stories else stories[-1].ended
    return max(0.0, (until or submitted) - submitted)


def state_line(run: RunDirectory, state: RunState) -> Text:
    """Where the run is, how it stands, why, and in which job."""
    line = Text(f"{run.path}: ", no_wrap=False)
    line.append(state.word, style=STYLE.get(state.word, ""))
    told = list(_told(state))
    if told:
        line.append(f" ({'; '.join(told)})")
    return line


def _told(state: RunState) -> Iterator[str]:
    if state.job is not None:
        yield state.job.description + (f": {state.job_state}" if state.job_state else "")
    yield f"attempt {state.attempt}"
    if state.living and state.report is not None and state.report.left_s is not None:
        yield f"{clock(state.report.left_s)} left"
    if state.detail:
        yield state.detail


def detail_json(run: RunDirectory, state: RunState) -> dict[str, Any]:
    """The keys are documented in prorl_hpc.cli.status."""
    snapshot = SnapshotReader(run).read()
    failure = readable_failure(run)
    return {
        **RunRow.of(run, state).as_json,
        "rewards": snapshot.rewards,
        "processes": {p.name: {"node": p.node, "phase": p.phase, "detail": p.detail} for p in snapshot.processes},
        "restarts": [str(restart) for restart in snapshot.restarts],
        **_service_json(snapshot),
        "last_step": snapshot.steps[-1] if snapshot.steps else None,
        "attempts": [attempt.as_json for attempt in attempt_stories(run, living=state.living)],
        "lost_nodes": [node.host for node in snapshot.lost],
        "process_ends": [msgspec.structs.asdict(end) for end in process_ends(run)],
        "failure": failure and msgspec.structs.asdict(failure),
    }


def _service_json(snapshot: Snapshot) -> dict[str, Any]:
    service = snapshot.run
    if service is None:
        return {"paused": False, "holds": {}, "draining": [], "policies": []}
    draining = [w.worker_id for w in service.workers if w.draining]
    return {
        "paused": service.paused,
        "holds": service.holds,
        "draining": draining + [s.server_id for s in service.servers if s.draining],
        "policies": [msgspec.structs.asdict(policy) for policy in service.policies],
    }


def _attempt_table(attempts: list[AttemptStory]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("attempt", "begun", "took", "ending"):
        table.add_column(column, no_wrap=True)
    table.add_column("reason", overflow="fold")
    if len(attempts) > _SHOWN_ATTEMPTS:
        table.add_row(Text(f"… {len(attempts) - _SHOWN_ATTEMPTS} earlier", style="dim"))
    for attempt in attempts[-_SHOWN_ATTEMPTS:]:
        table.add_row(
            Text(str(attempt.number)),
            Text(_moment(attempt.begun)),
            Text(clock(attempt.seconds) if attempt.seconds is not None else ""),
            Text(attempt.how),
            Text(_reason(attempt)),
        )
    return table


def _reason(attempt: AttemptStory) -> str:
    """With the nodes that were lost, where the reason does not name them."""
    unnamed = [host for host in attempt.lost_nodes if host not in attempt.reason]
    lost = f"lost: {', '.join(unnamed)}" if unnamed else ""
    return "; ".join(part for part in (attempt.reason, lost) if part)


def _end_table(ends: list[ProcessEnd]) -> Table:
    """Those that did not end well first."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("process", "node", "code"):
        table.add_column(column, no_wrap=True)
    table.add_column("ended", overflow="fold")
    for end in sorted(ends, key=lambda end: end.exit_code == 0)[:_SHOWN_ENDS]:
        code = "–" if end.exit_code is None else str(end.exit_code)
        table.add_row(Text(end.name), Text(end.node), Text(code), Text(end.how))
    if len(ends) > _SHOWN_ENDS:
        table.add_row(Text(f"… and {len(ends) - _SHOWN_ENDS} more", style="dim"))
    return table


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def _readable_ending(run: RunDirectory) -> AttemptEnding | None:
    try:
        return read_ending(run)
    except (OSError, msgspec.MsgspecError):
        return None


def readable_failure(run: RunDirectory) -> RunFailure | None:
    """None also for a file that does not read: this is for display."""
    try:
        return read_failure(run)
    except (OSError, msgspec.MsgspecError):
        return None
