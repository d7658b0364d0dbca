"""What went wrong in a stage, as data."""

from __future__ import annotations

from prorl_hpc.messages.errors import InferenceError, ProrlError, SandboxError, TransportError
from prorl_hpc.messages.rollout import Failure, FailureKind, Stage

_KINDS: tuple[tuple[type[ProrlError], FailureKind], ...] = (
    (SandboxError, FailureKind.SANDBOX),
    (InferenceError, FailureKind.INFERENCE),
    (TransportError, FailureKind.INFRASTRUCTURE),
)


def failure_of(stage: Stage, error: BaseException) -> Failure:
    """SandboxError → sandbox, InferenceError → inference, TransportError → infrastructure, else task."""
    kind = next((kind for type_, kind in _KINDS if isinstance(error, type_)), FailureKind.TASK)
    message = str(error) if isinstance(error, ProrlError) else f"{type(error).__name__}: {error}"
    return Failure(stage, kind, message)


def timeout_of(stage: Stage, budget_s: float) -> Failure:
    """A stage that used up its budget. A sandbox that does not start is worth another node; the rest is not."""
    kind = FailureKind.SANDBOX if stage is Stage.INIT else FailureKind.TASK
    return Failure(stage, kind, f"{stage} did not end within its budget of {budget_s:g} s")
