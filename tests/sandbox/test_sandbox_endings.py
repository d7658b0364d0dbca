"""Starts that fail, are cancelled or overtaken by a close: each ends whole, and with a reason that says what to do."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import psutil
import pytest
from sandbox_runtimes import KINDS, attached, prepared

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import apptainer, attached_runtime
from prorl_hpc.sandbox.apptainer import ApptainerRuntime, check_bind
from prorl_hpc.sandbox.attached import AttachedSandbox
from prorl_hpc.sandbox.local import LocalRuntime
from prorl_hpc.sandbox.protocol import SandboxSpec


class Children:
    """Processes below this one that were not there when the test began, nor were begun by those that were: the nodes of
    other tests' clusters go on."""

    def __init__(self) -> None:
        self._before = psutil.Process().children()

    def __call__(self) -> list[psutil.Process]:
        own = [child for child in psutil.Process().children() if child not in self._before]
        return own + [below for child in own for below in child.children(recursive=True)]


@pytest.fixture
def children() -> Children:
    return Children()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.03, 0.15])
async def test_a_close_leaves_nothing_of_the_starts_under_way(
    kind: str, delay_s: float, runtime_dir: Path, children: Children
) -> None:
    runtime = await prepared(kind, runtime_dir, SandboxConfig(start_limit=3, start_retries=1))
    starts = [asyncio.create_task(runtime.start(SandboxSpec(f"s{number}"))) for number in range(5)]
    await asyncio.sleep(delay_s)
    await runtime.close()
    assert children() == [] and list(runtime_dir.iterdir()) == []
    for result in await asyncio.gather(*starts, return_exceptions=True):
        assert isinstance(result, SandboxError | AttachedSandbox), result
    assert children() == [] and list(runtime_dir.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_start_that_is_cancelled_while_its_process_begins(
    kind: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """The process is known, and ended, whenever that is."""
    runtime = await prepared(kind, runtime_dir)
    begun = asyncio.Event()
    spawn = attached_runtime._spawn

    async def slow(*arguments: object) -> asyncio.subprocess.Process:
        process = await spawn(*arguments)
        begun.set()
        await asyncio.sleep(0.1)
        return process

    monkeypatch.setattr(attached_runtime, "_spawn", slow)
    start = asyncio.create_task(runtime.start(SandboxSpec("a")))
    await begun.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert children() == []
    await runtime.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_trial_that_fails_is_ended(
    kind: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    await (await prepared(kind, runtime_dir)).close()

    async def fail(trial: AttachedSandbox) -> None:
        raise SandboxError("the shell does not work")

    monkeypatch.setattr(attached_runtime, "_try_shell", fail)
    with pytest.raises(SandboxError, match="the shell does not work"):
        await attached(kind, runtime_dir).prepare()
    assert children() == [] and list(runtime_dir.iterdir()) == []


@pytest.mark.apptainer
async def test_what_the_system_refuses_while_preparing_has_a_reason(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(base: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await (await prepared("apptainer", runtime_dir)).close()
    monkeypatch.setattr(apptainer, "make_base", refuse)
    with pytest.raises(SandboxError, match=r"no sandbox can be started: .*No space left on device"):
        await attached("apptainer", runtime_dir).prepare()
    assert list(runtime_dir.iterdir()) == []


async def test_what_the_system_refuses_while_starting_is_a_sandbox_failure(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*arguments: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    runtime = await prepared("local", runtime_dir)
    monkeypatch.setattr(attached_runtime, "_spawn", refuse)
    with pytest.raises(SandboxError, match=r"did not start in 1 attempts; .*Too many open files"):
        await runtime.start(SandboxSpec("a"))
    await runtime.close()


@pytest.mark.parametrize("name", ["co:lon", "com,ma", "two\nlines"])
async def test_paths_that_would_be_bound_in_pieces_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"cannot be bound .*run\.runtime_root chooses another place"):
        await ApptainerRuntime(SandboxConfig(), tmp_path / name).prepare()
    with pytest.raises(SandboxError, match="it has"):
        check_bind(f"/{name}", "")
    check_bind("/ü/a b/$x\\y", "")


async def test_local_sandboxes_take_any_path(tmp_path: Path) -> None:
    runtime = LocalRuntime(SandboxConfig(), tmp_path / "a: b,ü")
    await runtime.prepare()
    sandbox = await runtime.start(SandboxSpec("a"))
    assert (await sandbox.call("bash", {"command": "echo here"}, 20)).output == "here\n"
    await runtime.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_relative_runtime_directory_will_do(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runtime = await prepared(kind, Path("run"))
    await runtime.close()
    assert list((tmp_path / "run").iterdir()) == []
