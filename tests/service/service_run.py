"""A coordinator with both its faces, and fake agents that speak the real protocol over real ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.core.policy_choice import PolicyChoice
from prorl_hpc.messages.control import (
    Acknowledge,
    AgentToCoordinator,
    CoordinatorToInference,
    CoordinatorToWorker,
    Discard,
    Discarded,
    Goodbye,
    Held,
    InferenceHello,
    MoveRun,
    Pools,
    ServerLoad,
    ServerRef,
    Shutdown,
    StageFinished,
    StartEval,
    StartInit,
    StartRun,
    Welcome,
    WorkerHello,
    WorkerLoad,
)
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Finish, Segment, Trajectory
from prorl_hpc.observe.rollout_store import RolloutStore
from prorl_hpc.rollout.coordinator import Coordinator
from prorl_hpc.rollout.journal import Journal
from prorl_hpc.rollout.keepsakes import Keepsakes
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.service.server import HttpFace
from prorl_hpc.transport.channels import DealerLine, RouterDoor
from prorl_hpc.transport.keys import RunKeys

TRAJECTORY = Trajectory([Segment([1, 2]), Segment([3], [-0.5], True, 0)], finish=Finish.ANSWER)
"""What every RUN of a FakeWorker gives."""


@dataclass
class FakeWorker:
    """Obeys orders at once. ``reward(spec)`` scores; ``breaks(spec, stage, attempt number)`` may return a failure;
    RUN waits for ``may_run``, EVAL for ``may_eval``. ``unacknowledged``: last reports of attempts."""

    keys: RunKeys
    endpoint: str
    worker_id: str
    reward: Callable[[RolloutSpec], float] = lambda spec: float(spec.sample % 2)
    breaks: Callable[[RolloutSpec, Stage], FailureKind | None] = lambda spec, stage: None
    pools: Pools = field(default_factory=Pools)
    specs: dict[str, RolloutSpec] = field(default_factory=dict)
    ran_on: dict[str, str] = field(default_factory=dict)
    running: dict[str, Stage] = field(default_factory=dict)
    servers: dict[str, ServerRef] = field(default_factory=dict)
    reports: dict[str, list[StageFinished]] = field(default_factory=dict)
    unacknowledged: dict[str, list[StageFinished]] = field(default_factory=dict)
    hellos: int = 0
    started: list[str] = field(default_factory=list)
    """Attempts, in the order in which they began."""
    slow: set[str] = field(default_factory=set)
    """Attempts whose RUN waits until it is not in here."""
    discarded: list[str] = field(default_factory=list)
    may_run: asyncio.Event = field(default_factory=asyncio.Event)
    may_eval: asyncio.Event = field(default_factory=asyncio.Event)
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    shut_down: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_run.set()
        self.may_eval.set()
        self._works: set[asyncio.Task[None]] = set()
        self.rejoin(self.endpoint)

    def rejoin(self, endpoint: str) -> None:
        """A new line; what it holds and does is not touched."""
        self._line: DealerLine[CoordinatorToWorker] = DealerLine(
            CoordinatorToWorker, self.keys, endpoint, self.worker_id
        )
        self._open = True
        self.welcomed.clear()

    async def live(self) -> None:
        await self.hello()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            async for message in self._line.messages():
                if isinstance(message, Welcome):
                    self.welcomed.set()
                    if not message.known:
                        await self.hello()
                elif isinstance(message, Acknowledge):
                    for rollout_id in message.rollout_ids:
                        self.unacknowledged.pop(rollout_id, None)
                elif isinstance(message, Shutdown):
                    self.shut_down.set()
                else:
                    # Goes on when the line is gone.
                    self._works.add(asyncio.create_task(self._obey(message)))

    async def hello(self) -> None:
        self.hellos += 1
        held = [
            Held(name, self.reports.get(name, []), self.running.get(name), self.servers.get(name))
            for name in sorted(self.specs)
        ]
        held += [Held(name, reports) for name, reports in self.unacknowledged.items()]
        await self._send(WorkerHello(self.worker_id, "node", self.pools, "fake", held))

    async def leave(self) -> None:
        await self._send(Goodbye(self.worker_id))

    def close(self) -> None:
        self._open = False
        self._line.close()

    async def _send(self, message: Any) -> None:
        if self._open:
            await self._line.send(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            await self._send(WorkerLoad(self.worker_id, len(self.specs)))

    async def _obey(self, order: Any) -> None:
        match order:
            case StartInit():
                self.specs[order.spec.rollout_id] = order.spec
                self.running[order.spec.rollout_id] = Stage.INIT
                self.started.append(order.spec.rollout_id)
                await self._finish(order.spec.rollout_id, Stage.INIT)
            case StartRun():
                self.ran_on[order.rollout_id] = order.server.server_id
                self.running[order.rollout_id] = Stage.RUN
                self.servers[order.rollout_id] = order.server
                await self.may_run.wait()
                while order.rollout_id in self.slow:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                told = {"finish": TRAJECTORY.finish, "generated_tokens": TRAJECTORY.num_trained_tokens}
                tokens = msgspec.msgpack.encode(TRAJECTORY)
                await self._finish(order.rollout_id, Stage.RUN, trajectory=tokens, **told)
            case MoveRun():
                self.ran_on[order.rollout_id] = order.server.server_id if order.server else ""
            case StartEval():
                self.running[order.rollout_id] = Stage.EVAL
                await self.may_eval.wait()
                if order.rollout_id not in self.specs:
                    return
                reward = self.reward(self.specs[order.rollout_id])
                await self._finish(order.rollout_id, Stage.EVAL, reward=reward, metrics={"turns": 2.0})
            case Discard():
                self._drop(order.rollout_id)
                self.unacknowledged.pop(order.rollout_id, None)
                self.discarded.append(order.rollout_id)
                await self._send(Discarded(self.worker_id, order.rollout_id))

    async def _finish(self, rollout_id: str, stage: Stage, **results: Any) -> None:
        if rollout_id not in self.specs:
            return  # discarded meanwhile
        kind = self.breaks(self.specs[rollout_id], stage)
        if kind is not None:
            results = {"failure": Failure(stage, kind, "it broke"), "trajectory": results.get("trajectory")}
        report = StageFinished(self.worker_id, rollout_id, stage, **results)
        self.running.pop(rollout_id, None)
        self.servers.pop(rollout_id, None)
        self.reports.setdefault(rollout_id, []).append(report)
        if kind is not None or stage is Stage.EVAL:
            self.unacknowledged[rollout_id] = self._drop(rollout_id)
        await self._send(report)

    def _drop(self, rollout_id: str) -> list[StageFinished]:
        for known in (self.specs, self.running, self.servers):
            known.pop(rollout_id, None)
        return self.reports.pop(rollout_id, [])


@dataclass
class FakeServer:
    """An inference agent. ``refuses`` is the error text with which it answers weight updates;
    with ``holds_loads`` it answers only when ``may_load``."""

    keys: RunKeys
    endpoint: str
    server_id: str
    version: int = 0
    healthy: bool = True
    refuses: str = ""
    policy: str = "policy"
    got: list[WeightUpdate] = field(default_factory=list)
    holds_loads: bool = False
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    shut_down: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if not self.holds_loads:
            self.may_load.set()
        self._line: DealerLine[CoordinatorToInference] = DealerLine(
            CoordinatorToInference, self.keys, self.endpoint, self.server_id
        )

    async def hello(self) -> None:
        ref = ServerRef(self.server_id, "node", f"ipc:///{self.server_id}", "", self.policy)
        await self._line.send(InferenceHello(ref, "fake 1", "model", self.version, 1024, "1"))

    async def live(self) -> None:
        await self.hello()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            async for message in self._line.messages():
                match message:
                    case Welcome():
                        self.welcomed.set()
                        if not message.known:
                            await self.hello()
                    case Shutdown():
                        self.shut_down.set()
                    case WeightUpdate():
                        group.create_task(self._load(message))

    def close(self) -> None:
        self._line.close()

    async def report(self) -> None:
        await self._line.send(ServerLoad(self.server_id, self.version, 0, 0, 0, 0, self.healthy))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            await self.report()

    async def _load(self, update: WeightUpdate) -> None:
        self.got.append(update)
        await self.may_load.wait()
        if not self.refuses:
            self.version = update.version
        await self._line.send(WeightUpdated(update.version, self.server_id, 0.1, 0.0, self.refuses))


@dataclass
class ServiceRun:
    """Everything of one test."""

    coordinator: Coordinator
    door: RouterDoor[AgentToCoordinator]
    face: HttpFace
    keys: RunKeys
    rollouts: Path
    status_file: Path
    socket_path: Path
    stop: asyncio.Event
    drain: asyncio.Event
    main: asyncio.Task[None]
    _lives: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _agents: list[FakeWorker | FakeServer] = field(default_factory=list)

    async def worker(self, worker_id: str = "w0", **settings: Any) -> FakeWorker:
        agent = FakeWorker(self.keys, self.door.ipc, worker_id, **settings)
        await self._start(worker_id, agent)
        return agent

    async def server(self, server_id: str = "s0", **settings: Any) -> FakeServer:
        agent = FakeServer(self.keys, self.door.ipc, server_id, **settings)
        await self._start(server_id, agent)
        return agent

    async def vanish(self, agent_id: str) -> None:
        """The agent falls silent without a word."""
        task = self._lives.pop(agent_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def resume(self, agent_id: str, agent: FakeWorker | FakeServer) -> None:
        """One that vanished speaks again."""
        self._lives[agent_id] = asyncio.create_task(agent.live())
        await asyncio.wait_for(agent.welcomed.wait(), 10)

    def client(self, **settings: Any) -> RolloutClient:
        return RolloutClient(str(self.socket_path), **settings)

    async def _start(self, agent_id: str, agent: FakeWorker | FakeServer) -> None:
        self._agents.append(agent)
        self._lives[agent_id] = asyncio.create_task(agent.live())
        await asyncio.wait_for(agent.welcomed.wait(), 10)

    async def close(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.main, 10)
        for agent_id in tuple(self._lives):
            await self.vanish(agent_id)
        for agent in self._agents:
            agent.close()


@asynccontextmanager
async def service_run(
    directory: Path, *, epoch: str = "run", attempt: int = 1, choice: PolicyChoice | None = None, **settings: Any
) -> AsyncIterator[ServiceRun]:
    """``settings`` are those of RolloutConfig. In the directory of an earlier one it goes on with what that had."""
    config = RolloutConfig(**{"heartbeat_s": 0.1, "lost_after_s": 1.0, "retries": 2, **settings})
    run_directory = RunDirectory(directory)
    keys = RunKeys.load(directory / "keys") if (directory / "keys").exists() else RunKeys.create(directory / "keys")
    run_directory.state.mkdir(parents=True, exist_ok=True)
    store = RolloutStore(run_directory) if config.keep_trajectories else None
    journal = await Journal.open(directory / "journal.sqlite", epoch=epoch, attempt=attempt, store=store)
    door: RouterDoor[AgentToCoordinator] = RouterDoor(AgentToCoordinator, keys, directory / "c.zmq")
    stop, drain, status_file = asyncio.Event(), asyncio.Event(), directory / "status.json"
    try:
        coordinator = Coordinator(
            "run-1",
            config,
            door,
            journal,
            Keepsakes(directory / "keepsakes.json", epoch, attempt),
            status_file=status_file,
            drained_marker=directory / "DRAINED",
            tasks=["t"],
            choice=choice,
            first_server_s=0.3,
        )
        await coordinator.resume()
        main = asyncio.create_task(coordinator.run(stop, drain=drain))
        async with HttpFace(coordinator, directory / "c.http", tcp_host="127.0.0.1", token=keys.api_token) as face:
            run = ServiceRun(
                coordinator,
                door,
                face,
                keys,
                run_directory.rollouts,
                status_file,
                directory / "c.http",
                stop,
                drain,
                main,
            )
            try:
                yield run
            finally:
                await run.close()
    finally:
        door.close()
        await journal.close(goes_on=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
