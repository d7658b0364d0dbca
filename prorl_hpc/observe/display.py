"""The live display of a run: one rich renderable per snapshot."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prorl_hpc.messages.batch import BatchProgress
from prorl_hpc.messages.rollout import Status
from prorl_hpc.messages.status import Phase, PolicyStatus, ServerStatus, WorkerStatus
from prorl_hpc.observe.restarts import Restart
from prorl_hpc.observe.snapshot import Snapshot
from prorl_hpc.observe.wording import clock, count, finishes_told, number, overlap_told, sparkline

PHASE_STYLE = {
    Phase.STARTING: "yellow",
    Phase.READY: "green",
    Phase.STOPPING: "yellow",
    Phase.ENDED: "dim",
    Phase.FAILED: "bold red",
}
DRAINING = " (draining)"
SHOWN_RESTARTS = 3
MAX_ROWS = 8
"""Workers, servers and processes shown; more are counted in a last line, so that a big run fits a terminal."""


def render(run_id: str, snapshot: Snapshot, elapsed_s: float) -> RenderableType:
    """Process states while starting; then the run's work."""
    parts: list[RenderableType] = []
    if snapshot.restarts:
        parts.append(_restart_lines(snapshot.restarts))
    if snapshot.waits_for:
        parts.append(Text(snapshot.waits_for, style="yellow"))
    unsettled = [p for p in snapshot.processes if p.phase is not Phase.READY]
    if unsettled or (snapshot.starting and not snapshot.waits_for):
        parts.append(_process_table(snapshot))
    if snapshot.run is not None and not snapshot.starting:
        if snapshot.run.workers and not snapshot.gone:
            parts.append(_worker_table(snapshot.run.workers))
        if snapshot.run.servers and not snapshot.gone:
            parts.append(_server_table(snapshot.run.servers))
        if len(snapshot.run.policies) > 1:
            parts.append(_policy_table(snapshot.run.policies, gone=snapshot.gone))
        parts.append(_rollout_line(snapshot))
    if snapshot.trainer is not None:
        parts.append(_training(snapshot))
    spaced = [part for entry in parts for part in (Text(""), entry)][1:]
    title = Text.assemble((run_id, "bold"), f"  {clock(elapsed_s)}")
    return Panel(Group(*spaced), title=title, title_align="left", border_style="blue")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    return table


def _row(table: Table, *cells: str | Text) -> None:
    """Add a row; strings are taken as they are, never as markup."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def _more(table: Table, total: int) -> None:
    if total > MAX_ROWS:
        _row(table, Text(f"… and {total - MAX_ROWS} more", style="dim"))


def _process_table(snapshot: Snapshot) -> RenderableType:
    processes = snapshot.processes
    if not processes:
        waiting = Text("waiting for the first process to report", style="yellow")
        return Text("no process of this attempt has reported", style="dim") if snapshot.gone else waiting
    table = _table("process", "node", "state", "doing")
    busy_first = sorted(processes, key=lambda p: p.phase is Phase.READY)
    for process in busy_first[:MAX_ROWS]:
        state = Text(process.phase.value, style=PHASE_STYLE[process.phase])
        _row(table, process.name, process.node, state, process.detail)
    _more(table, len(processes))
    return table


def _restart_lines(restarts: list[Restart]) -> RenderableType:
    """The newest last."""
    before = len(restarts) - SHOWN_RESTARTS
    lines = [f"{count(before, 'earlier restart')}"] if before > 0 else []
    lines += [f"{time.strftime('%H:%M:%S', time.localtime(r.time))}  {r}" for r in restarts[-SHOWN_RESTARTS:]]
    return Text("\n".join(lines), style="yellow")


def _worker_table(workers: list[WorkerStatus]) -> Table:
    names = list(dict.fromkeys(name for worker in workers for name in worker.pools))
    table = _table("worker", "node", "sandbox", *names)
    for worker in workers[:MAX_ROWS]:
        pools = [_pool(worker.pools.get(name, [0, 0])) for name in names]
        name = worker.worker_id + DRAINING * worker.draining
        _row(table, name, worker.node, worker.sandbox, *pools)
    _more(table, len(workers))
    return table


def _pool(used_and_size: list[int]) -> Text:
    used, size = (*used_and_size, 0, 0)[:2]
    return Text(f"{used}/{size}", style="bold" if size and used >= size else "")


def _server_table(servers: list[ServerStatus]) -> Table:
    several = len({server.policy for server in servers}) > 1
    policy = ["policy"] if several else []
    table = _table("server", *policy, "node", "engine", "weights", "running", "waiting", "tokens/s", "")
    for server in servers[:MAX_ROWS]:
        health = Text(server.detail) if server.healthy else Text(server.detail or "unhealthy", style="bold red")
        _row(
            table,
            server.server_id + DRAINING * server.draining,
            *([server.policy] if several else []),
            server.node or server.url,
            server.engine,
            f"v{server.weight_version}",
            str(server.running),
            str(server.waiting),
            f"{server.tokens_per_s:.0f}",
            health,
        )
    _more(table, len(servers))
    return table


def _policy_table(policies: list[PolicyStatus], *, gone: bool) -> Table:
    """What their rollouts came to; the seconds are means of those that are done."""
    table = _table("policy", "weights", "servers", "done", "broken", "reward", "seconds", "tokens", "finishes")
    for policy in policies[:MAX_ROWS]:
        _row(
            table,
            policy.policy,
            f"v{policy.newest_version}",
            "" if gone else f"{policy.eligible}/{policy.servers}",
            str(policy.rollouts.get(Status.DONE.value, 0)),
            str(sum(policy.rollouts.get(status.value, 0) for status in (Status.FAILED, Status.TIMED_OUT))),
            number(policy.reward, 3),
            number(policy.seconds, 1),
            str(policy.generated_tokens),
            finishes_told(policy.finishes),
        )
    _more(table, len(policies))
    return table


def _rollout_line(snapshot: Snapshot) -> Text:
    assert snapshot.run is not None
    counts = ", ".join(f"{n} {status}" for status, n in snapshot.run.rollouts.items() if n)
    line = Text(f"rollouts  {counts or ('none' if snapshot.gone else 'none yet')}")
    if snapshot.gone:
        return line
    line.append(f"; {snapshot.run.rollouts_per_s:.2f}/s")
    if snapshot.run.draining:
        line.append("  draining: those under way may end, none is started", style="yellow")
    elif snapshot.run.paused:
        line.append("  paused: no rollout is started", style="yellow")
    elif snapshot.run.holds:
        line.append(f"  held back by {', '.join(snapshot.run.holds)}: no rollout is started", style="yellow")
    for batch in snapshot.run.batches[:2]:
        line.append("\n" + _batch(batch))
    return line


def _batch(batch: BatchProgress) -> str:
    dropped = f"{batch.uniform} uniform, {batch.broken} broken"
    return (
        f"batch {batch.batch_id}  {batch.accepted}/{batch.groups_wanted} groups, {batch.in_flight} in flight, {dropped}"
    )


def _training(snapshot: Snapshot) -> RenderableType:
    trainer = snapshot.trainer
    assert trainer is not None
    head = Text.assemble(("step ", "dim"), (f"{trainer.step}/{trainer.steps}", "bold"), f"  {trainer.phase}")
    if trainer.detail:
        head.append(f" ({trainer.detail})")
    if trainer.eta_s and not snapshot.gone:
        head.append(f"  about {clock(trainer.eta_s)} to go")
    lines: list[RenderableType] = [head, _bar(trainer.step, trainer.steps)]
    if rewards := snapshot.rewards:
        last = " ".join(number(reward) for reward in rewards[-5:])
        lines.append(Text.assemble(("reward    ", "dim"), (sparkline(rewards), "green"), f"  {last}"))
    held = [] if trainer.heldout_start is None else [f"{number(trainer.heldout_start, 3)} before"]
    if trainer.heldout_last is not None and len(snapshot.evals) > 1:
        held.append(f"{number(trainer.heldout_last, 3)} now ({count(len(snapshot.evals), 'evaluation')})")
    if held:
        lines.append(Text.assemble(("held-out  ", "dim"), ", ".join(held)))
    if told := _last_step(snapshot):
        lines.append(Text.assemble(("last step ", "dim"), told))
    return Group(*lines)


def _last_step(snapshot: Snapshot) -> str:
    """How training and rollouts overlapped, and the weights that were published after it."""
    if not snapshot.steps:
        return ""
    record = snapshot.steps[-1]
    version, stale = record.get("weight_version"), record.get("groups_stale")
    told = [
        overlap_told(record),
        f"{stale} too old" if stale else "",
        f"weights v{version} published" if isinstance(version, int) else "",
    ]
    return ", ".join(part for part in told if part)


def _bar(done: int, total: int, width: int = 60) -> Text:
    filled = width * min(done, total) // max(1, total)
    return Text.assemble(("━" * filled, "green"), ("━" * (width - filled), "bright_black"))
