"""A sandbox whose cells the ipython tests run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sandbox_runtimes import SMALL, prepared

from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, ToolResult


class Cells:
    """Calls the ipython tools of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def run(self, code: str, timeout_s: float = 60.0, kernel: str = "main") -> ToolResult:
        return await self.sandbox.call("ipython", {"code": code, "kernel": kernel}, timeout_s)

    async def say(self, code: str, kernel: str = "main") -> str:
        """The output of a cell that must succeed."""
        result = await self.run(code, kernel=kernel)
        assert result.exit_code == 0, result.output
        return result.output

    async def interrupt(self, kernel: str = "main") -> ToolResult:
        return await self.sandbox.call("ipython_interrupt", {"kernel": kernel}, 20.0)

    async def restart(self, kernel: str = "main") -> ToolResult:
        return await self.sandbox.call("ipython_restart", {"kernel": kernel}, 60.0)

    async def bash(self, command: str) -> str:
        return (await self.sandbox.call("bash", {"command": command}, 20.0)).output


@asynccontextmanager
async def cells_of(
    mode: str, runtime_dir: Path, kind: str = "local", env: dict[str, str] | None = None
) -> AsyncIterator[Cells]:
    runtime = await prepared(kind, runtime_dir, replace(SMALL, ipython=mode))
    try:
        yield Cells(await runtime.start(SandboxSpec("cells", env=env or {})))
    finally:
        await runtime.close()
