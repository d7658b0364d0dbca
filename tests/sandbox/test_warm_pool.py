"""Sandboxes kept ready: handed out once, alive, and only to those who ask for nothing special."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sandbox_runtimes import KINDS, prepared

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec

WARM = SandboxConfig(warm=2, start_retries=0)


@pytest.fixture(params=KINDS)
async def runtime(request: pytest.FixtureRequest, runtime_dir: Path):
    runtime = await prepared(request.param, runtime_dir, WARM)
    yield runtime
    await runtime.close()
    assert list(runtime_dir.iterdir()) == []


async def full(runtime: AttachedRuntime) -> None:
    async with asyncio.timeout(30):
        while len(runtime._warm) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def server(sandbox: Sandbox) -> int:
    return sandbox._connected().server_pid


async def test_a_ready_one_is_handed_out_and_replaced(runtime: AttachedRuntime) -> None:
    await full(runtime)
    ready = [server(sandbox) for sandbox in runtime._warm._ready]
    first, second = await runtime.start(SandboxSpec("a")), await runtime.start(SandboxSpec("b"))
    assert [server(first), server(second)] == ready and (first.sandbox_id, second.sandbox_id) == ("a", "b")
    await first.upload("f", b"x")
    assert (await second.call("bash", {"command": "ls"}, 20)).output == ""
    await full(runtime)
    assert server(await runtime.start(SandboxSpec("c"))) not in ready
    with pytest.raises(SandboxError, match="already"):
        await runtime.start(SandboxSpec("a"))


async def test_a_special_one_is_started_for_itself(runtime: AttachedRuntime) -> None:
    await full(runtime)
    ready = [server(sandbox) for sandbox in runtime._warm._ready]
    sandbox = await runtime.start(SandboxSpec("a", env={"ASKED": "1"}))
    assert server(sandbox) not in ready
    assert (await sandbox.call("bash", {"command": "echo $ASKED"}, 20)).output == "1\n"
    assert server(await runtime.start(SandboxSpec("b", network=WARM.network, image=WARM.image))) in ready


async def test_a_dead_one_is_replaced_and_never_handed_out(runtime: AttachedRuntime) -> None:
    await full(runtime)
    ready = list(runtime._warm._ready)
    for pid in [server(sandbox) for sandbox in ready]:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while any(sandbox.alive for sandbox in ready):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    sandbox = await runtime.start(SandboxSpec("a"))
    assert sandbox not in ready
    assert (await sandbox.call("bash", {"command": "echo here"}, 20)).output == "here\n"
    await full(runtime)
    assert not set(ready) & set(runtime._warm._ready)


async def test_closing_while_it_fills_leaves_nothing(runtime_dir: Path) -> None:
    for delay in (0.0, 0.02, 0.1):
        runtime = await prepared("local", runtime_dir, WARM)
        await asyncio.sleep(delay)
        await runtime.close()
        assert list(runtime_dir.iterdir()) == []
