"""Commands and cells, in containers, that would take the tool server or its shells with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_runtimes import SMALL, prepared

from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, ToolResult

pytestmark = pytest.mark.apptainer


@pytest.fixture
async def sandbox(runtime_dir: Path) -> AsyncIterator[Sandbox]:
    runtime = await prepared("apptainer", runtime_dir, SMALL)
    try:
        yield await runtime.start(SandboxSpec("hostile"))
    finally:
        await runtime.close()


async def bash(sandbox: Sandbox, command: str, timeout_s: float = 20.0, shell: str = "main") -> ToolResult:
    return await sandbox.call("bash", {"command": command, "shell": shell}, timeout_s)


async def test_no_signal_from_inside_ends_the_tool_server(sandbox: Sandbox) -> None:
    await bash(sandbox, "x=kept")
    sent = await bash(sandbox, "for number in $(seq 1 64); do kill -$number $PPID; done; pkill -f python; echo $x")
    assert sent.output.endswith("kept\n"), sent
    assert (await bash(sandbox, "echo $x")).output == "kept\n"
    assert (await bash(sandbox, "kill -INT -1; kill -TERM -1; echo $x", shell="other")).output == "\n"
    assert (await bash(sandbox, "echo ok")).output.endswith("ok\n")
