"""What a person sees of a running run: written by the processes, read by the display and the report.

The coordinator writes RunStatus to ``state/status.json`` once a second, the trainer TrainerStatus to
``state/trainer-status.json`` at every change, and every process ProcessState to ``state/<name>.json``.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from prorl_hpc.messages.batch import BatchProgress


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"
    FAILED = "failed"


class ProcessState(msgspec.Struct, frozen=True):
    """One process of the run. ``detail`` says what it is doing (``loading the model``); ``endpoints``
    are the addresses it serves, by kind. ``start_token`` is the one that its supervisor gave it for this start: in a
    container, its pid is not that of the supervisor's child."""

    name: str
    role: str
    node: str
    pid: int
    phase: Phase
    detail: str = ""
    endpoints: dict[str, str] = {}
    updated: float = 0.0
    start_token: str = ""


class WorkerStatus(msgspec.Struct, frozen=True):
    worker_id: str
    node: str
    sandbox: str
    pools: dict[str, list[int]]
    """Pool name → [in use, size]."""
    draining: bool = False


class ServerStatus(msgspec.Struct, frozen=True):
    server_id: str
    node: str
    engine: str
    model: str
    healthy: bool
    weight_version: int
    assigned: int
    running: int
    waiting: int
    generated_tokens: int
    tokens_per_s: float
    detail: str = ""
    policy: str = "policy"
    draining: bool = False
    url: str = ""
    """Where an outside server is; empty for the run's own."""


class PolicyStatus(msgspec.Struct, frozen=True):
    """``servers`` serve it, ``eligible`` of them are healthy, not draining and have the newest weights.

    The rest is of its rollouts that have ended, in all attempts of the run: by ``rollouts`` status; ``reward`` is the mean
    over those that are done, ``seconds`` theirs from start to end, queues included; why their conversations ended."""

    policy: str
    newest_version: int
    servers: int
    eligible: int
    rollouts: dict[str, int] = {}
    reward: float | None = None
    seconds: float | None = None
    finishes: dict[str, int] = {}
    generated_tokens: int = 0


class RunStatus(msgspec.Struct, frozen=True):
    run_id: str
    time: float
    uptime_s: float
    rollouts: dict[str, int]
    """Rollouts by status, the finished ones of all attempts of the run."""
    workers: list[WorkerStatus]
    servers: list[ServerStatus]
    batches: list[BatchProgress]
    rollouts_per_s: float
    paused: bool = False
    """No rollout is started until somebody resumes; those under way go on. Remembered over restarts."""
    policies: list[PolicyStatus] = []
    draining: bool = False
    """The attempt is about to end: no rollout is started any more."""
    holds: dict[str, float] = {}
    """Who holds rollouts back for a while, beside ``paused``, and for how many seconds more. None is started until all are over."""


class TrainerStatus(msgspec.Struct, frozen=True):
    """``phase``: waiting, loading, evaluating, rollouts, training, publishing, saving, done."""

    phase: str
    step: int
    steps: int
    time: float
    reward: float | None = None
    heldout_start: float | None = None
    heldout_last: float | None = None
    eta_s: float | None = None
    detail: str = ""
    last_metrics: dict[str, Any] = {}
