"""Directories of the node in a sandbox: there, read-only, and nowhere where they would hide what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import AttachedRuntime, check_spec
from prorl_hpc.sandbox.local import LocalRuntime
from prorl_hpc.sandbox.protocol import SandboxSpec


async def test_a_directory_of_the_node_is_there(runtime: AttachedRuntime, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("it is here")
    sandbox = await runtime.start(SandboxSpec("box", binds={str(tmp_path): str(tmp_path)}))
    assert (await sandbox.exec(["cat", f"{tmp_path}/tool"], 20)).output == "it is here"
    await sandbox.stop()
    assert (tmp_path / "tool").read_text() == "it is here"


async def test_elsewhere_inside_and_read_only(runtime: AttachedRuntime, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("it is here")
    spec = SandboxSpec("box", binds={str(tmp_path): "/opt/agents"})
    if isinstance(runtime, LocalRuntime):
        with pytest.raises(SandboxError, match=f"{tmp_path} cannot be at /opt/agents in a local sandbox"):
            await runtime.start(spec)
        return
    sandbox = await runtime.start(spec)
    assert (await sandbox.exec(["cat", "/opt/agents/tool"], 20)).output == "it is here"
    written = await sandbox.exec(["sh", "-c", "echo other >/opt/agents/tool"], 20)
    assert "Read-only file system" in written.output
    await sandbox.stop()


@pytest.mark.parametrize("inside", ["/", "/workspace/a", "/.prorl", "/etc", "/proc/1", "opt/a", "/opt/../etc"])
def test_places_that_are_taken(inside: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="sandbox bind to"):
        check_spec(SandboxSpec("box", binds={str(tmp_path): inside}))


def test_a_directory_that_is_not_there() -> None:
    with pytest.raises(SandboxError, match="sandbox bind /nowhere: there is no such directory on this node"):
        check_spec(SandboxSpec("box", binds={"/nowhere": "/opt/a"}))
