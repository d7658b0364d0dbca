"""Everything that crosses the coordinator's ZeroMQ door, by direction.

A node's agent says Hello, then sends a heartbeat every ``heartbeat_s``; Hello and heartbeats are answered by
Welcome, so silence means that the coordinator is gone. ``Welcome.known`` false (the coordinator was started anew, or
had given the agent up) asks for a Hello, which says all that the agent holds: what the coordinator still wants of it
goes on, the rest is discarded.

Numbers and names have bounds, and what contradicts itself does not decode: the door refuses and counts it, so that an
agent gone wrong breaks nothing but its own rollouts.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import Failure, RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Finish, Finite, Version

Slots = Annotated[int, Meta(ge=0, le=1_000_000)]
AgentId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}\Z")]
Tokens = Annotated[int, Meta(ge=0, le=2**40)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_ATTEMPT = re.compile(r"[^#]{1,256}(#([2-9]|[1-9]\d{1,5}))?", re.ASCII)
_ORDER = list(Stage)


class Pools(msgspec.Struct, frozen=True):
    """Slots of one worker: rollouts at once in each stage, and prepared sandboxes held READY; with ``ready`` 0 (to compare
    with) an INIT begins only when a RUN slot is free for it. ``coupled``: one pool of ``run`` slots instead of three,
    each held from INIT to the end of EVAL (to compare with)."""

    init: Slots = 4
    ready: Slots = 8
    run: Slots = 16
    eval: Slots = 4
    coupled: bool = False


class ServerRef(msgspec.Struct, frozen=True):
    """How a worker reaches an LLM server: its agent's ZeroMQ door. ``ipc`` is used when ``node``
    is the worker's own node, else ``tcp``. An outside server has a ``url`` instead (``http(s)://host:port/v1`` or
    ``unix:/path``), the ``model`` to ask it for, perhaps an ``api_key``, and the ``weight_version`` that its answers
    are marked with (the run's own servers mark them themselves). Ids in its answers are smaller than ``vocab_size``; 0:
    not known."""

    server_id: str
    node: str
    ipc: str
    tcp: str
    policy: str = "policy"
    url: str = ""
    model: str = ""
    api_key: str = ""
    weight_version: Version = 0
    vocab_size: int = 0


class Held(msgspec.Struct, frozen=True):
    """One attempt that lives on a worker, or that ended there and was not acknowledged yet. ``rollout_id`` is the
    attempt's. ``reports``: what was reported of it, in order. ``running``: the stage at work now, RUN against ``server``."""

    rollout_id: str
    reports: list[StageFinished] = []
    running: Stage | None = None
    server: ServerRef | None = None

    def __post_init__(self) -> None:
        if not _ATTEMPT.fullmatch(self.rollout_id):
            raise ValueError(f"{self.rollout_id[:300]!r} names no attempt")
        stages = [report.stage for report in self.reports] + ([self.running] if self.running is not None else [])
        places = [_ORDER.index(stage) for stage in stages]
        others = [report.rollout_id for report in self.reports if report.rollout_id != self.rollout_id]
        over = any(report.failure is not None for report in (self.reports if self.running else self.reports[:-1]))
        if others or over or places != sorted(set(places)):
            raise ValueError(f"the reports of {self.rollout_id} contradict one another")


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    worker_id: AgentId
    node: str
    pools: Pools
    sandbox: str
    """The runtime in use, for people: ``apptainer 1.4.5`` or ``local``."""
    held: list[Held] = []
    """All that lives on this worker now: empty from a fresh one, so whatever the coordinator had assigned
    to it before and is not named here is lost; what is named goes on."""

    def __post_init__(self) -> None:
        if len({held.rollout_id for held in self.held}) < len(self.held):
            raise ValueError("an attempt is held twice")
        if any(report.worker_id != self.worker_id for held in self.held for report in held.reports):
            raise ValueError("a report that is held is another worker's")


class InferenceHello(msgspec.Struct, frozen=True, tag=True):
    """``weight_version``: the newest weights that it serves and has proved; an older one than the newest published asks
    for that. ``instance`` is random per process: another one than before means that it was started anew, and that what
    it was asked before is forgotten."""

    server: ServerRef
    engine: str
    model: str
    weight_version: Version
    max_model_len: int
    instance: str = ""
    fingerprint: str = ""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answers Hello and every heartbeat. ``known`` false: the coordinator does not know the agent; say Hello."""

    run_id: str
    heartbeat_s: float
    known: bool = True


class WorkerLoad(msgspec.Struct, frozen=True, tag=True):
    """A worker's heartbeat."""

    worker_id: str
    sandboxes: int


class ServerLoad(msgspec.Struct, frozen=True, tag=True):
    """An inference agent's heartbeat. Counters are totals since start, tokens."""

    server_id: str
    weight_version: Version
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    healthy: bool
    detail: str = ""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """An agent leaves in order; its rollouts are to be retried elsewhere."""

    agent_id: str


class Draining(msgspec.Struct, frozen=True, tag=True):
    """A worker takes no new rollouts; those that it has go on."""

    worker_id: str


class StartInit(msgspec.Struct, frozen=True, tag=True):
    """Start a sandbox for the rollout and prepare the task. ``budget_s`` bounds the stage."""

    spec: RolloutSpec
    budget_s: float


class StartRun(msgspec.Struct, frozen=True, tag=True):
    """Run the agent loop in the prepared sandbox against ``server``."""

    rollout_id: str
    server: ServerRef
    budget_s: float


class StartEval(msgspec.Struct, frozen=True, tag=True):
    """Score the finished trajectory."""

    rollout_id: str
    budget_s: float


class MoveRun(msgspec.Struct, frozen=True, tag=True):
    """Go on with the RUN against another server, from the tokens so far; None: there is none, the RUN fails."""

    rollout_id: str
    server: ServerRef | None


class RequestServers(msgspec.Struct, frozen=True, tag=True):
    """Only with rollout.balancing=round_robin_per_request: all LLM servers that new requests may go to, in place of those
    told before. Requests that are under way go on where they are, but for those to ``lost``."""

    servers: list[ServerRef]
    lost: str = ""


class ServerTrouble(msgspec.Struct, frozen=True, tag=True):
    """A rollout's server does not answer it. Answered by MoveRun."""

    worker_id: str
    rollout_id: str
    server_id: str
    message: str


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    """The last reports of these attempts are on disk: the worker may forget them."""

    rollout_ids: list[str]


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Stop whatever the worker does for this rollout and free its sandbox. Answered by Discarded."""

    rollout_id: str


class StageFinished(msgspec.Struct, frozen=True, tag=True):
    """A stage ended on a worker. ``failure`` None means success. ``trajectory`` (messages.trajectory.Trajectory in
    msgpack, which the coordinator never looks into) comes with RUN (partial if it failed); ``reward`` and ``metrics``
    with EVAL; ``finish`` and ``generated_tokens`` (of branches too) with RUN. After EVAL, and after any failure, the
    worker frees the sandbox by itself (it does not wait for Discard) and keeps this last report until it is acknowledged.
    ``timed_out``: the stage's budget ran out."""

    worker_id: str
    rollout_id: str
    stage: Stage
    failure: Failure | None = None
    timed_out: bool = False
    trajectory: bytes | None = None
    reward: Finite | None = None
    metrics: dict[str, Finite] = {}
    busy_s: Seconds = 0.0
    finish: Finish = Finish.UNKNOWN
    generated_tokens: Tokens = 0


class Discarded(msgspec.Struct, frozen=True, tag=True):
    """``trajectory``: what RUN had generated, as in StageFinished."""

    worker_id: str
    rollout_id: str
    trajectory: bytes | None = None


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The run is over: stop everything and exit 0."""

    reason: str


AgentToCoordinator = (
    WorkerHello
    | InferenceHello
    | WorkerLoad
    | ServerLoad
    | Goodbye
    | Draining
    | StageFinished
    | Discarded
    | ServerTrouble
    | WeightUpdated
)
CoordinatorToWorker = (
    Welcome | StartInit | StartRun | StartEval | MoveRun | RequestServers | Discard | Acknowledge | Shutdown
)
CoordinatorToInference = Welcome | WeightUpdate | Shutdown
