"""A place where an agent's commands run, as its users see it.

Runtime makes sandboxes; a Sandbox runs tools and moves files. Implementations: apptainer, local, fake.
All raise SandboxError when the sandbox itself breaks; a command that fails is a ToolResult.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ToolResult:
    """What a tool call gave. ``output`` is text (stdout and stderr as a terminal would show them), cut to the
    sandbox's limit with a mark; ``exit_code`` is None when the call timed out or its command still runs; the sandbox
    stays usable."""

    output: str
    exit_code: int | None = 0
    timed_out: bool = False
    seconds: float = 0.0
    running: bool = False
    """The command goes on; ``bash_look``, ``bash_input`` and ``bash_interrupt`` reach it."""
    cwd: str = ""
    """The shell's directory after the command; empty for other tools."""
    files: tuple[str, ...] = ()
    """Paths of files in the workspace that the call made for its caller: the images of an ipython cell."""


@dataclass(frozen=True, kw_only=True)
class SandboxNeeds:
    """What a task asks of its sandbox."""

    image: str = ""
    """Empty: the runtime's default (``sandbox.image``)."""
    network: str = ""
    """none or host; empty: the runtime's default (``sandbox.network``)."""
    writable: str = ""
    """workspace (the image is read-only) or image (all of it can be written, into a directory that is removed with the
    sandbox; of ``host`` all but the node's /usr); empty: the runtime's default (``sandbox.writable``)."""
    env: dict[str, str] = field(default_factory=dict)
    sockets: dict[str, str] = field(default_factory=dict)
    """Unix sockets of the node that the sandbox may connect to, whatever its network: name (lower case) → path on the
    node, where somebody must be listening before the sandbox starts. Inside, each is ``/.prorl/sockets/<name>``
    (``local``: its own path), and its path is in $PRORL_SOCKET_<NAME>."""
    binds: dict[str, str] = field(default_factory=dict)
    """Directories of the node that are there inside, read-only: path on the node → path inside, both absolute. ``local``
    has no other paths than the node's, so there both are the same."""


@dataclass(frozen=True)
class SandboxSpec(SandboxNeeds):
    """One sandbox. ``sandbox_id`` is unique within the run and file-name safe."""

    sandbox_id: str


def spec_of(sandbox_id: str, needs: SandboxNeeds) -> SandboxSpec:
    """A sandbox with these needs."""
    return SandboxSpec(sandbox_id, **vars(needs))


@dataclass(frozen=True)
class SandboxStats:
    """What a sandbox uses now. Memory is what its processes have to themselves and its files in memory."""

    processes: int
    memory_bytes: int
    disk_bytes: int
    """Of workspace, /tmp and what was written over the image."""
    cpu_s: float
    """Used by its processes so far, those that ended included where the kernel tells."""


@runtime_checkable
class Sandbox(Protocol):
    """One running sandbox. Its working directory is ``/workspace`` inside (for ``local``: a private directory);
    relative paths are relative to it."""

    @property
    def sandbox_id(self) -> str: ...

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """Call a tool of the tool server; ``bash`` takes {"command": str} in one persistent shell.
        Calls may overlap: those of one shell take turns, all others run side by side.
        An unknown tool or bad arguments come back as a ToolResult with exit_code 2 and a readable message."""
        ...

    async def exec(self, argv: Sequence[str], timeout_s: float, *, cwd: str = "", stdin: bytes = b"") -> ToolResult:
        """Run a program by itself, beside the shells, with nothing of their state."""
        ...

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file, making its directories; refuses paths that leave the workspace (SandboxError)."""
        ...

    async def download(self, path: str) -> bytes:
        """Read a file of the workspace; SandboxError if there is none."""
        ...

    async def stats(self) -> SandboxStats: ...

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
        """Start one and attach to its tool server, with bounded retry; raises SandboxError with the last reason."""
        ...

    async def close(self) -> None:
        """Stop every sandbox that is still there."""
        ...
