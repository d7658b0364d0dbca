"""What a run's files say at this moment; never raises on missing, half-written or foreign ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.status import Phase, ProcessState, RunStatus, TrainerStatus
from prorl_hpc.observe.attempts import LostNode, lost_nodes
from prorl_hpc.observe.metrics import MetricsLog, newest_per_step
from prorl_hpc.observe.reading import read_tolerantly
from prorl_hpc.observe.restarts import Restart, read_restarts


@dataclass(frozen=True)
class Snapshot:
    """``steps`` and ``evals`` are the records of metrics.jsonl, one per step."""

    processes: list[ProcessState] = field(default_factory=list)
    run: RunStatus | None = None
    trainer: TrainerStatus | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    restarts: list[Restart] = field(default_factory=list)
    waits_for: str = ""
    """Why the job waits in a queue; empty while it does not, or where nobody asked."""
    lost: list[LostNode] = field(default_factory=list)
    """Nodes that the attempt has lost so far; their processes count as failed."""

    gone: bool = False
    """Nothing of the run is there any more: what is shown is what was said last."""

    @property
    def starting(self) -> bool:
        """True until every process that has reported was ready; one that is started again was."""
        again = {restart.name for restart in self.restarts}
        return not self.processes or any(p.phase is Phase.STARTING and p.name not in again for p in self.processes)

    @property
    def over(self) -> bool:
        """The trainer is done and every process has ended."""
        return self.finished and all(p.phase in (Phase.ENDED, Phase.FAILED) for p in self.processes)

    @property
    def rewards(self) -> list[float]:
        """Training reward per step, oldest first."""
        return [float(r["reward"]) for r in self.steps if isinstance(r.get("reward"), int | float)]


class SnapshotReader:
    """Reads one run again and again; metrics.jsonl only when it has grown."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._metrics_size = -1
        self._steps: list[dict[str, Any]] = []
        self._evals: list[dict[str, Any]] = []

    def read(self) -> Snapshot:
        self._read_metrics()
        lost = lost_nodes(self._run)
        return Snapshot(
            processes=_without(lost, self._processes()),
            run=read_tolerantly(self._run.status_file, RunStatus),
            trainer=read_tolerantly(self._run.trainer_status_file, TrainerStatus),
            steps=self._steps,
            evals=self._evals,
            finished=self._run.finished_marker.exists(),
            restarts=read_restarts(self._run),
            lost=lost,
        )

    def _processes(self) -> list[ProcessState]:
        """In the order of starting: coordinator, workers, servers, trainers."""
        others = {self._run.status_file, self._run.trainer_status_file, self._run.failure_file}
        files = [file for file in self._run.state.glob("*.json") if file not in others]
        states = [state for file in files if (state := read_tolerantly(file, ProcessState)) is not None]
        order = {role: place for place, role in enumerate(("coordinator", "worker", "inference", "trainer"))}
        return sorted(states, key=lambda s: (order.get(s.role, len(order)), len(s.name), s.name))

    def _read_metrics(self) -> None:
        try:
            size = self._run.metrics_file.stat().st_size
            if size == self._metrics_size:
                return
            records = MetricsLog(self._run.metrics_file).read()
        except OSError:
            return
        self._metrics_size = size
        self._steps = newest_per_step(records, "step")
        self._evals = newest_per_step(records, "eval")


def _without(lost: list[LostNode], processes: list[ProcessState]) -> list[ProcessState]:
    """Those of lost nodes said last what is no longer so; some may never have said anything."""
    hosts = {name: node.host for node in lost for name in node.processes}
    over = (Phase.ENDED, Phase.FAILED)
    return [
        replace(p, phase=Phase.FAILED, detail=f"its node {hosts[p.name]} was lost")
        if p.name in hosts and p.phase not in over
        else p
        for p in processes
    ]
