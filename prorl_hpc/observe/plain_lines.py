"""The progress of a run as lines of text, one when something changes: for logs, CI and pipes."""

from __future__ import annotations

from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.snapshot import Snapshot
from prorl_hpc.observe.wording import clock, number, overlap_told, step_seconds

HEARTBEAT_S = 30.0


class PlainLines:
    """Turns one snapshot after the other into the lines that are new. ``now`` is any rising clock, seconds."""

    def __init__(self, now: float) -> None:
        self._started = self._last_line = now
        self._phases: dict[str, Phase] = {}
        self._restarts = 0
        self._waits_for = ""
        self._told: set[tuple[str, object, object]] | None = None

    def update(self, snapshot: Snapshot, now: float) -> list[str]:
        changes = self._process_news(snapshot)
        news = self._queue_news(snapshot)
        news += self._restart_news(snapshot)
        news += [line for phase, line in changes if phase is not Phase.ENDED]
        news += self._record_news(snapshot)
        news += [line for phase, line in changes if phase is Phase.ENDED]  # what a process did comes before its end
        if not news and now - self._last_line >= HEARTBEAT_S:
            news = [heartbeat(snapshot)]
        if news:
            self._last_line = now
        elapsed = clock(now - self._started)
        return [f"[{elapsed:>7}] {line}" for line in news]

    def _process_news(self, snapshot: Snapshot) -> list[tuple[Phase, str]]:
        lines = []
        for process in snapshot.processes:
            before = self._phases.get(process.name)
            self._phases[process.name] = process.phase
            if process.phase is not before and (line := _phase_line(process)):
                lines.append((process.phase, line))
        return lines

    def _queue_news(self, snapshot: Snapshot) -> list[str]:
        """That the job waits, and again when the reason is another one, or when it does not any more."""
        before, self._waits_for = self._waits_for, snapshot.waits_for
        if before == snapshot.waits_for:
            return []
        return [snapshot.waits_for or "the job waits no longer"]

    def _restart_news(self, snapshot: Snapshot) -> list[str]:
        new = snapshot.restarts[self._restarts :]
        self._restarts = len(snapshot.restarts)
        return [f"{restart} on {restart.node}" for restart in new]

    def _record_news(self, snapshot: Snapshot) -> list[str]:
        """New evaluations and steps. A run joined late, or resumed, starts with the newest of each."""
        records = sorted([*snapshot.evals, *snapshot.steps], key=lambda r: (r["step"], r["kind"] != "step"))
        keys = [(record["kind"], record["step"], record.get("time")) for record in records]
        if self._told is None:
            self._told = set(keys)
            newest = [id(records_of[-1]) for records_of in (snapshot.evals, snapshot.steps) if records_of]
            new = [record for record in records if id(record) in newest]
        else:
            new = [record for key, record in zip(keys, records, strict=True) if key not in self._told]
            self._told.update(keys)
        return [_eval_line(r) if r["kind"] == "eval" else _step_line(r, snapshot) for r in new]


def heartbeat(snapshot: Snapshot) -> str:
    """What the run is doing, in one line."""
    if snapshot.waits_for:
        return snapshot.waits_for
    waiting = [p for p in snapshot.processes if p.phase is Phase.STARTING]
    if waiting or not snapshot.processes:
        names = ", ".join(p.name + (f" ({p.detail})" if p.detail else "") for p in waiting)
        return f"still starting: {names or 'no process has reported yet'}"
    parts = []
    if (trainer := snapshot.trainer) is not None:
        detail = f" ({trainer.detail})" if trainer.detail else ""
        parts.append(f"step {trainer.step}/{trainer.steps}: {trainer.phase}{detail}")
    if (run := snapshot.run) is not None:
        if run.paused:
            parts.append("paused")
        parts += [f"held back by {holder} for {left_s:.0f} s more" for holder, left_s in run.holds.items()]
        flying = sum(batch.in_flight for batch in run.batches)
        tokens_per_s = sum(server.tokens_per_s for server in run.servers)
        parts.append(f"{flying} in flight, {tokens_per_s:.0f} tokens/s")
    return "; ".join(parts) or "running"


def _phase_line(process: ProcessState) -> str:
    detail = f": {process.detail}" if process.detail else ""
    match process.phase:
        case Phase.READY:
            return f"{process.name} ready on {process.node}{detail}"
        case Phase.FAILED:
            return f"{process.name} FAILED on {process.node}{detail}"
        case Phase.ENDED:
            return f"{process.name} ended"
        case _:
            return ""


def _eval_line(record: dict[str, object]) -> str:
    successes, rollouts = record.get("successes"), record.get("rollouts")
    counts = f" ({successes} of {rollouts})" if isinstance(successes, int) and isinstance(rollouts, int) else ""
    return f"held-out reward {number(record.get('reward'), 3)}{counts} after step {record['step']}"


def _step_line(record: dict[str, object], snapshot: Snapshot) -> str:
    steps = f"/{snapshot.trainer.steps}" if snapshot.trainer is not None else ""
    parts = [f"step {record['step']}{steps}", f"reward {number(record.get('reward'), 3)}"]
    groups = [f"{record[key]} {key.removeprefix('groups_').replace('_', ' ')}" for key in GROUP_KEYS if record.get(key)]
    if groups:
        parts.append("groups " + ", ".join(groups))
    if (seconds := step_seconds(record)) is not None:
        overlap = overlap_told(record)
        parts.append(f"{seconds:.1f} s" + (f" ({overlap})" if overlap else ""))
    if snapshot.trainer is not None and snapshot.trainer.eta_s:
        parts.append(f"about {clock(snapshot.trainer.eta_s)} to go")
    return "  ".join(parts)


GROUP_KEYS = (
    "groups_accepted",
    "groups_equal_rewards",
    "groups_uniform",
    "groups_broken",
    "groups_carried",
    "groups_stale",
)
