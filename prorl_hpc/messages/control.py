"""Everything that crosses the coordinator's ZeroMQ door, by direction.

A node's agent says Hello, is answered Welcome, then sends Heartbeat every ``heartbeat_s``. An agent that
has heard nothing for long says Hello again, to learn whether the coordinator lives: that is answered by
Welcome too, and loses nothing that the Hello says the agent still holds.
"""

from __future__ import annotations

import msgspec

from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import Failure, RolloutSpec, Stage
from prorl_hpc.messages.trajectory import Trajectory


class Pools(msgspec.Struct, frozen=True):
    """Slots of one worker: rollouts at once in each stage, and prepared sandboxes held READY."""

    init: int = 4
    ready: int = 8
    run: int = 16
    eval: int = 4


class ServerRef(msgspec.Struct, frozen=True):
    """How a worker reaches an LLM server: its agent's ZeroMQ door. ``ipc`` is used when ``node``
    is the worker's own node, else ``tcp``."""

    server_id: str
    node: str
    ipc: str
    tcp: str
    policy: str = "policy"


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    worker_id: str
    node: str
    pools: Pools
    sandbox: str
    """The runtime in use, for people: ``apptainer 1.4.5`` or ``local``."""
    held: list[str] = []
    """Rollouts that live on this worker now: empty from a fresh one, so whatever the coordinator had assigned
    to it before and is not named here is lost; what is named goes on."""


class InferenceHello(msgspec.Struct, frozen=True, tag=True):
    server: ServerRef
    engine: str
    model: str
    weight_version: int
    max_model_len: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    run_id: str
    heartbeat_s: float


class WorkerLoad(msgspec.Struct, frozen=True, tag=True):
    """A worker's heartbeat."""

    worker_id: str
    sandboxes: int


class ServerLoad(msgspec.Struct, frozen=True, tag=True):
    """An inference agent's heartbeat. Counters are totals since start, tokens."""

    server_id: str
    weight_version: int
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    healthy: bool
    detail: str = ""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """An agent leaves in order; its rollouts are to be retried elsewhere."""

    agent_id: str


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


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Stop whatever the worker does for this rollout and free its sandbox. Answered by Discarded."""

    rollout_id: str


class StageFinished(msgspec.Struct, frozen=True, tag=True):
    """A stage ended on a worker. ``failure`` None means success. ``trajectory`` comes with RUN (partial
    if it failed); ``reward`` and ``metrics`` with EVAL. After EVAL, and after any failure, the worker
    frees the sandbox by itself (it does not wait for Discard). ``timed_out``: the stage's budget ran out."""

    worker_id: str
    rollout_id: str
    stage: Stage
    failure: Failure | None = None
    timed_out: bool = False
    trajectory: Trajectory | None = None
    reward: float | None = None
    metrics: dict[str, float] = {}
    busy_s: float = 0.0


class Discarded(msgspec.Struct, frozen=True, tag=True):
    worker_id: str
    rollout_id: str
    trajectory: Trajectory | None = None


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The run is over: stop everything and exit 0."""

    reason: str


AgentToCoordinator = (
    WorkerHello | InferenceHello | WorkerLoad | ServerLoad | Goodbye | StageFinished | Discarded | WeightUpdated
)
CoordinatorToWorker = Welcome | StartInit | StartRun | StartEval | Discard | Shutdown
CoordinatorToInference = Welcome | WeightUpdate | Shutdown
