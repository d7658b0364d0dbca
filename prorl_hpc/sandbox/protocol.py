"""A place where an agent's commands run, as its users see it.

Runtime makes sandboxes; a Sandbox runs tools and moves files. Implementations: apptainer, local, fake.
All raise SandboxError when the sandbox itself breaks; a command that fails is a ToolResult.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ToolResult:
    """What a tool call gave. ``output`` is text (stdout and stderr as a terminal would show them), cut to the
    sandbox's limit with a mark; ``exit_code`` is None when the call timed out; the sandbox stays usable."""

    output: str
    exit_code: int | None = 0
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class SandboxSpec:
    """What a rollout asks of its sandbox. ``sandbox_id`` is unique within the run and file-name safe.
    ``image`` empty: the runtime's default. ``network``: none or host."""

    sandbox_id: str
    image: str = ""
    network: str = "none"
    env: dict[str, str] = field(default_factory=dict)


@runtime_checkable
class Sandbox(Protocol):
    """One running sandbox. Its working directory is ``/workspace`` inside (for ``local``: a private directory);
    relative paths are relative to it."""

    @property
    def sandbox_id(self) -> str: ...

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """Call a tool of the tool server; ``bash`` takes {"command": str} in one persistent shell.
        An unknown tool or bad arguments come back as a ToolResult with exit_code 2 and a readable message."""
        ...

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file, making its directories; refuses paths that leave the workspace (SandboxError)."""
        ...

    async def download(self, path: str) -> bytes:
        """Read a file of the workspace; SandboxError if there is none."""
        ...

    async def stop(self) -> None:
        """End it and prove that its processes and directories are gone. Idempotent."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """Makes sandboxes on this node, at most ``start_limit`` starting at once."""

    @property
    def description(self) -> str:
        """For people: ``apptainer 1.4.5`` or ``local (no isolation)``."""
        ...

    async def prepare(self) -> None:
        """Check that it works here (one trial sandbox), make the default image, sweep what dead runs of this
        user left. Raises SandboxError that says what is missing and what to do."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start one, with bounded retry; raises SandboxError with the last reason."""
        ...

    async def close(self) -> None:
        """Stop every sandbox that is still there."""
        ...
