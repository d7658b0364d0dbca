"""The training loop in virtual time: a rollout service, a crew and a publisher whose work takes seconds that cost none."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, RunSettings, TrainerConfig
from prorl_hpc.config.store import save
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec, BatchState, GroupOutcome, GroupResult
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.messages.status import RunStatus, ServerStatus
from prorl_hpc.messages.trajectory import Segment, Trajectory
from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.trainer.batches import TrainingBatch
from prorl_hpc.trainer.best_model import BestModel
from prorl_hpc.trainer.checkpoint import Position
from prorl_hpc.trainer.engine import StepOutcome
from prorl_hpc.trainer.loop import TrainingLoop
from prorl_hpc.trainer.metric_writers import MetricWriters
from prorl_hpc.trainer.stopping import StopSignal

T = TypeVar("T")
TRAIN_S, GENERATE_S, LOAD_S, TURNS = 10.0, 8.0, 1.0, 4
ROWS = [{"id": f"r{i}", "number": i} for i in range(17)]
START = Position()
HELDOUT = [{"id": "h0", "number": 100}]


def run_virtually(work: Callable[[], Awaitable[T]]) -> T:
    """Run to the end on a loop whose clock jumps to the next timer; what is left over is cancelled."""

    class Jumping(selectors.SelectSelector):
        def select(self, timeout: float | None = None) -> list[Any]:
            ready = super().select(0)
            if not ready and timeout is None:
                raise AssertionError("everybody waits for something that nobody will do")
            loop.now += 0.0 if ready else (timeout or 0.0)
            return ready

    class Loop(asyncio.SelectorEventLoop):
        now = 0.0

        def time(self) -> float:
            return self.now

    loop = Loop(Jumping())
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work())  # type: ignore[arg-type]


@dataclass
class Service:
    """Every group takes ``generate_s`` in TURNS turns, each stamped with the weights that are served at its end. A batch drops and
    replaces some groups, by its name. Batches go on without whoever asked for them."""

    version: int = 0
    generate_s: float = GENERATE_S
    load_s: float = LOAD_S
    held_until: float = 0.0
    holds: list[float] = field(default_factory=list)
    """When somebody held rollouts back, or did so longer."""
    resumes: int = 0
    broken: str = ""
    """A batch that the service cannot make."""
    old: str = ""
    """A batch whose first group is of version 0."""
    all_old: bool = False
    """All groups are of version 0."""
    says_versions: bool = True
    refuses_update: int = -1
    after_update: Callable[[int], None] = lambda version: None
    specs: dict[str, BatchSpec] = field(default_factory=dict)
    ordered_at: list[tuple[str, int]] = field(default_factory=list)
    """Batches with the weights that were served when they were ordered."""
    tasks: dict[str, asyncio.Task[BatchResult]] = field(default_factory=dict)
    recorded: dict[str, BatchResult] = field(default_factory=dict)
    paused_updates: list[int] = field(default_factory=list)

    async def submit_batch(self, spec: BatchSpec) -> BatchProgress:
        if self.specs.setdefault(spec.batch_id, spec) != spec:
            raise ServiceError("other contents", code="batch_differs", status=409)
        if spec.batch_id in self.recorded:
            return self.recorded[spec.batch_id].progress
        if spec.batch_id not in self.tasks:
            self.ordered_at.append((spec.batch_id, self.version))
            self.tasks[spec.batch_id] = asyncio.create_task(self._make(spec))
        return BatchProgress(spec.batch_id, BatchState.RUNNING, spec.groups_wanted, 0, 0, 0, 0, 0, 0, 0)

    async def wait_batch(self, batch_id: str) -> BatchResult:
        if batch_id == self.broken:
            await asyncio.sleep(1.0)
            raise ServiceError("the journal is gone", code="internal", status=500)
        if batch_id not in self.recorded:
            await asyncio.shield(self.tasks[batch_id])
        return self.recorded[batch_id]

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        if self.held:
            self.paused_updates.append(update.version)
        await asyncio.sleep(self.load_s)
        if update.version == self.refuses_update:
            return [WeightUpdated(update.version, "inference-0", LOAD_S, error="no such file")]
        self.version = update.version
        self.after_update(update.version)
        return [WeightUpdated(update.version, "inference-0", LOAD_S, 0.0)]

    @property
    def held(self) -> bool:
        return self.held_until > asyncio.get_running_loop().time()

    async def pause(self, holder: str, for_s: float) -> RunStatus:
        assert holder == "trainer"
        now = asyncio.get_running_loop().time()
        self.holds.append(now)
        self.held_until = now + for_s
        return await self.status()

    async def resume(self, holder: str) -> RunStatus:
        assert holder == "trainer"
        self.held_until = 0.0
        self.resumes += 1
        return await self.status()

    async def status(self) -> RunStatus:
        server = ServerStatus("inference-0", "here", "fake", "tiny", True, self.version, 0, 0, 0, 0, 0.0)
        return RunStatus("run", 0.0, 0.0, {}, [], [server], [], 0.0)

    def lose(self) -> None:
        """A new attempt: what was not finished is lost."""
        for task in self.tasks.values():
            task.cancel()
        self.tasks.clear()

    async def _make(self, spec: BatchSpec) -> BatchResult:
        started = asyncio.get_running_loop().time()
        versions = []
        for _ in range(TURNS):
            await asyncio.sleep(self.generate_s / TURNS)
            versions.append(self.version)
        dropped = random.Random(spec.batch_id).randrange(3) if spec.batch_id.startswith("step") else 0
        groups = []
        for index in range(spec.groups_wanted + dropped):
            outcome = GroupOutcome.UNIFORM if index < dropped else GroupOutcome.ACCEPTED
            old = self.all_old or (spec.batch_id == self.old and index == dropped)
            stamps: list[int | None] = [0] * TURNS if old else [*versions]
            stamps = stamps if self.says_versions else [None] * TURNS
            groups.append(GroupResult(f"{spec.batch_id}.g{index}", index, outcome, _rollouts(spec, index, stamps)))
        done = sum(len(g.rollouts) for g in groups)
        progress = BatchProgress(
            spec.batch_id, BatchState.DONE, spec.groups_wanted, spec.groups_wanted, dropped, 0, 0, done, 0, len(groups)
        )
        self.recorded[spec.batch_id] = BatchResult(progress, groups, asyncio.get_running_loop().time() - started)
        return self.recorded[spec.batch_id]


def _rollouts(spec: BatchSpec, index: int, versions: list[int | None]) -> list[RolloutResult]:
    segments = [Segment([1, 2, 3])]
    for version in versions:
        segments += [Segment([7, 8], [-1.0, -0.5], True, version), Segment([9])]
    group_id = f"{spec.batch_id}.g{index}"
    return [
        RolloutResult(
            f"{group_id}.s{k}",
            group_id,
            k,
            spec.task,
            Status.DONE,
            float(k % 2),
            trajectory=Trajectory(segments),
            row_id=spec.rows[index]["id"],
        )
        for k in range(spec.group_size)
    ]


@dataclass
class VirtualCrew:
    """Learns nothing in TRAIN_S seconds, and remembers on what."""

    trained: list[TrainingBatch] = field(default_factory=list)
    saved: list[Position] = field(default_factory=list)
    saved_line: dict[str, Any] | None = None

    async def train(self, batch: TrainingBatch, learning_rate: float) -> StepOutcome:
        await asyncio.sleep(TRAIN_S)
        self.trained.append(batch)
        return StepOutcome({"loss": 0.0, "logprob_gap_mean": 0.0}, 1, batch.total_tokens)

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def save(self, position: Position, line: dict[str, Any] | None = None) -> Path:
        await asyncio.sleep(0.5)
        self.saved.append(position)
        return Path(f"step-{position.step}")

    async def keep_best(self, new: BestModel) -> None:
        pass


class VirtualPublisher:
    async def offer(self, version: int, probe: WeightProbe) -> WeightUpdate:
        await asyncio.sleep(0.5)
        return WeightUpdate(version, [], probe)

    def delivered(self) -> None:
        pass

    def close(self) -> None:
        pass


class Attempt:
    """One loop over a service."""

    def __init__(
        self, root: Path, service: Service, position: Position = START, before: int = 0, **trainer: Any
    ) -> None:
        """``before``: the staleness of an earlier attempt."""
        settings = {"steps": 6, "groups_per_step": 2, "group_size": 2, "max_rows_per_step": 6, "checkpoint_every": 99}
        config = ProrlConfig(run=RunSettings(root=str(root)), trainer=TrainerConfig(**(settings | trainer)))
        self.run = RunDirectory.create(config)
        if before:
            earlier = replace(config, trainer=replace(config.trainer, staleness=before))
            save(earlier, self.run.attempt_config_file)
            self.run = self.run.begin_attempt(2)
        self.service, self.crew, self.stop = service, VirtualCrew(), StopSignal()
        self.loop = TrainingLoop(
            config,
            self.run,
            service,
            self.crew,  # type: ignore[arg-type]
            self.stop,
            VirtualPublisher(),
            MetricWriters(MetricsLog(self.run.metrics_file), []),
            train_rows=ROWS,
            heldout_rows=HELDOUT,
            probe_ids=[1, 2, 3],
            position=position,
        )

    def records(self, kind: str = "step") -> list[dict[str, Any]]:
        return [r for r in MetricsLog(self.run.metrics_file).read() if r["kind"] == kind]

    def versions_trained(self) -> list[tuple[int, set[int]]]:
        """Of each step that this attempt trained: its number, and the weight versions of its tokens."""
        found = []
        for batch in self.crew.trained:
            groups = {sample.group_id for sample in batch.samples}
            name = next(iter(groups)).partition(".")[0]
            of = [g for g in self.service.recorded[name].groups if g.group_id in groups]
            versions = {s.weight_version for g in of for r in g.rollouts for s in r.trajectory.segments if s.trained}
            found.append((int(name.removeprefix("step-")), versions))
        return found


def rows_used(service: Service) -> list[int]:
    """Numbers of the training rows that were used up, in the order of steps."""
    names = sorted((n for n in service.recorded if n.startswith("step")), key=lambda n: int(n.removeprefix("step-")))
    return [
        int(row["number"])
        for name in names
        for row in service.specs[name].rows[: service.recorded[name].progress.rows_used]
    ]


def replaced(service: Service, **changes: Any) -> Service:
    """Another service that has the same records and orders."""
    return Service(specs=dict(service.specs), recorded=dict(service.recorded), **changes)
