"""Which runtime is taken, and what people are told when one cannot be."""

from __future__ import annotations

import asyncio
import logging
import shlex
from pathlib import Path

import pytest

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import container_binary
from prorl_hpc.sandbox.apptainer import _FROM_HOST, isolation_flags, launcher_environment
from prorl_hpc.sandbox.directories import Box
from prorl_hpc.sandbox.factory import make_runtime
from prorl_hpc.sandbox.fake import FakeRuntime
from prorl_hpc.sandbox.local import LocalRuntime
from prorl_hpc.sandbox.protocol import SandboxSpec


@pytest.fixture
def no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_binary, "BINARIES", ("no-such-apptainer",))


def fake_binary(monkeypatch: pytest.MonkeyPatch, directory: Path, body: str) -> None:
    """An `apptainer` that knows its version and does ``body`` for everything else."""
    script = directory / "fake-apptainer"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "apptainer version 9.9"; exit 0; }}\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setattr(container_binary, "BINARIES", (str(script),))


@pytest.mark.usefixtures("no_binary")
async def test_auto_falls_back_to_local_with_the_reason(runtime_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = SandboxConfig(image="/some/image.sif")
    with caplog.at_level(logging.WARNING):
        runtime = await make_runtime(config, runtime_dir, "run")
    assert isinstance(runtime, LocalRuntime)
    for words in ("neither apptainer nor singularity is on PATH", "ISOLATES NOTHING", "/some/image.sif is not used"):
        assert words in caplog.text
    assert caplog.text.count("ISOLATES NOTHING") == 1
    await runtime.close()


@pytest.mark.usefixtures("no_binary")
async def test_a_missing_binary_is_told(runtime_dir: Path) -> None:
    with pytest.raises(SandboxError, match=r"load the site's module.*sandbox\.kind=local"):
        await make_runtime(SandboxConfig(kind="apptainer"), runtime_dir, "run")


async def test_an_unknown_kind_is_told(runtime_dir: Path) -> None:
    with pytest.raises(SandboxError, match="allowed: auto, apptainer, local"):
        await make_runtime(SandboxConfig(kind="docker"), runtime_dir, "run")


@pytest.mark.parametrize(
    ("says", "advice"),
    [
        ("ERROR: Failed to create user namespace: maximum exceeded", r"user\.max_user_namespaces=15000"),
        ("FATAL: squashfuse_ll exited: failed to open /dev/fuse", r"sandbox\.unpack_images=true"),
        ("FATAL: while mounting overlay: invalid argument", r"sandbox\.writable=workspace"),
        ("FATAL: write /run/x: no space left on device", "or your quota is full"),
        ("FATAL: Couldn't determine user account information: user: unknown userid 12345", "getent passwd"),
        ("FATAL: destination /dev doesn't exist in container", "prorl-hpc image build"),
        ("FATAL: while obtaining CNI configuration: network not allowed", "--net --network none"),
    ],
)
async def test_a_failing_start_says_what_to_do(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, advice: str
) -> None:
    fake_binary(monkeypatch, tmp_path, f"echo {shlex.quote(says)} >&2; exit 255")
    with pytest.raises(SandboxError, match=advice) as error:
        await make_runtime(SandboxConfig(kind="apptainer"), runtime_dir, "run")
    assert says in str(error.value) and "exit code 255" in str(error.value)


async def test_a_start_that_hangs_is_given_up(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_binary(monkeypatch, tmp_path, "echo waiting for the moon >&2; exec sleep 600 </dev/null")
    monkeypatch.setattr("prorl_hpc.sandbox.attached.END_S", 0.1)
    with pytest.raises(SandboxError, match=r"not ready within 0\.5 s: waiting for the moon"):
        await make_runtime(SandboxConfig(kind="apptainer", start_timeout_s=0.5), runtime_dir, "run")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("/no/such.sif", "does not exist on this node"),
        ("docker://debian:12", "prorl-hpc image pull docker://docker.io/library/debian:12"),
        ("/usr", "not an apptainer sandbox"),
    ],
)
async def test_a_wrong_image_is_told_before_anything_starts(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, words: str
) -> None:
    fake_binary(monkeypatch, tmp_path, "exit 1")
    with pytest.raises(SandboxError, match=words):
        await make_runtime(SandboxConfig(kind="apptainer", image=image), runtime_dir, "run")


async def test_starts_are_retried_and_bounded(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await make_runtime(SandboxConfig(kind="local", start_retries=1), runtime_dir, "run")
    failing = tmp_path / "python"
    count = tmp_path / "count"
    failing.write_text(f"#!/bin/sh\necho x >> {count}; echo no luck >&2; exit 9\n")
    failing.chmod(0o755)
    monkeypatch.setattr("prorl_hpc.sandbox.local.sys.executable", str(failing))
    with pytest.raises(SandboxError, match=r"did not start in 2 attempts.*exit code 9: no luck"):
        await runtime.start(SandboxSpec("a"))
    assert count.read_text() == "x\nx\n"
    await runtime.close()


async def test_no_more_start_at_once_than_the_limit(runtime_dir: Path) -> None:
    runtime = await make_runtime(SandboxConfig(kind="local", start_limit=2), runtime_dir, "run")
    assert isinstance(runtime, LocalRuntime)
    starting = most = 0
    start_once = runtime._start_once

    async def counted(name: str, spec: SandboxSpec):
        nonlocal starting, most
        starting += 1
        most = max(most, starting)
        try:
            return await start_once(name, spec)
        finally:
            starting -= 1

    runtime._start_once = counted  # type: ignore[method-assign]
    await asyncio.gather(*(runtime.start(SandboxSpec(f"s-{n}")) for n in range(6)))
    assert most == 2
    await runtime.close()


def test_the_launcher_gets_an_allow_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("APPTAINER_BIND", "/home")
    env = launcher_environment("/opt/site/bin/apptainer", Box(tmp_path))
    assert set(env) <= {"PATH", "HOME", "LANG", "PRORL_SANDBOX", "LD_LIBRARY_PATH", *_FROM_HOST}
    assert env["PATH"].startswith("/opt/site/bin:") and env["HOME"] == str(tmp_path)


async def test_the_fake_can_fail_and_be_asked() -> None:
    runtime = FakeRuntime(bash=lambda command, files: f"{command}: {len(files)}", fail_starts=1)
    with pytest.raises(SandboxError, match="told so"):
        await runtime.start(SandboxSpec("a"))
    sandbox = await runtime.start(SandboxSpec("a"))
    await sandbox.upload("x", b"")
    assert (await sandbox.call("bash", {"command": "ls"}, 1)).output == "ls: 1"
    assert runtime.started[0].calls == [("bash", {"command": "ls"})]


async def test_a_start_that_a_close_overtakes_leaves_nothing(runtime_dir: Path) -> None:
    runtime = await make_runtime(SandboxConfig(kind="local", start_retries=0), runtime_dir, "run")
    starting = asyncio.create_task(runtime.start(SandboxSpec("late")))
    await asyncio.sleep(0.01)
    await runtime.close()
    (result,) = await asyncio.gather(starting, return_exceptions=True)
    assert isinstance(result, SandboxError)


async def test_a_binary_that_is_gone_is_told(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await make_runtime(SandboxConfig(kind="local", start_retries=0), runtime_dir, "run")
    monkeypatch.setattr("prorl_hpc.sandbox.local.sys.executable", str(tmp_path / "gone"))
    with pytest.raises(SandboxError, match=r"its process cannot be started: .*gone"):
        await runtime.start(SandboxSpec("a"))
    await runtime.close()


@pytest.mark.parametrize("kind", ["local", "apptainer"])
async def test_settings_that_are_no_choice_are_refused(kind: str, runtime_dir: Path) -> None:
    """A mistyped network must not become the node's."""
    for config in (SandboxConfig(kind=kind, network="lan"), SandboxConfig(kind=kind, writable="all")):
        with pytest.raises(SandboxError, match="is unknown; allowed"):
            await make_runtime(config, runtime_dir, "run")


def test_only_host_is_the_nodes_network() -> None:
    assert all("--net" in isolation_flags(network) for network in ("none", "lan", ""))
    assert "--net" not in isolation_flags("host")
