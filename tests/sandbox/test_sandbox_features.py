"""What a task can ask of its sandbox (writing over the image, sockets), and what a killed one leaves: nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from odd_images import busybox_image, sif_of
from sandbox_people import SMALL as SMALL_OF_PEOPLE
from sandbox_people import person
from sandbox_runtimes import KINDS, SMALL, prepared

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import container_binary
from prorl_hpc.sandbox.apptainer import overlay_flags
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.directories import Box, Holding
from prorl_hpc.sandbox.leftovers import HELPERS, in_session, sweep
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec

TIMEOUT_S = 30.0


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.call("bash", {"command": command}, TIMEOUT_S)
    assert result.exit_code == 0, result
    return result.output


@pytest.fixture
async def start(runtime_dir: Path, tmp_path: Path):
    """start(spec, kind, make): a sandbox of ``make``'s image (the default: ``host``)."""
    runtimes = []

    async def start_one(
        spec: SandboxSpec, kind: str = "apptainer", make: Callable[[Path], Path] | None = None
    ) -> Sandbox:
        if kind == "apptainer":
            await (await prepared(kind, runtime_dir)).close()  # skips where there is none
        config = SandboxConfig(image=str(make(tmp_path / "image")), start_retries=0) if make else SMALL
        runtimes.append(await prepared(kind, runtime_dir, config))
        return await runtimes[-1].start(spec)

    yield start_one
    for runtime in runtimes:
        await runtime.close()


def busybox_sif(path: Path) -> Path:
    return sif_of(path, busybox_image(path))


# --- sockets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_socket_of_the_node_is_reached_without_network(start, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "llm"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.readline())
        writer.close()

    server = await asyncio.start_unix_server(answer, str(path))
    sandbox = await start(SandboxSpec("a", network="none", sockets={"llm": str(path)}), kind)
    inside = str(path) if kind == "local" else "/.prorl/sockets/llm"
    assert await output(sandbox, "echo $PRORL_SOCKET_LLM") == f"{inside}\n"
    code = (
        "import os, socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(os.environ['PRORL_SOCKET_LLM'])\n"
        "s.sendall(b'this\\n')\nprint(s.recv(99))"
    )
    result = await sandbox.call("ipython", {"code": code}, TIMEOUT_S)
    assert "b'got this\\n'" in result.output
    await sandbox.stop()
    assert path.is_socket()
    server.close()


@pytest.mark.parametrize(
    ("sockets", "words"),
    [({"Bad-Name": "/x"}, "a lower-case letter"), ({"llm": "/no/such"}, "no Unix socket at /no/such")],
)
async def test_a_wrong_socket_is_told(start, sockets: dict[str, str], words: str) -> None:
    with pytest.raises(SandboxError, match=words):
        await start(SandboxSpec("a", sockets=sockets), "local")


# --- writing over the image -------------------------------------------------------------------------


@pytest.mark.apptainer
@pytest.mark.parametrize("make", [busybox_image, busybox_sif])
async def test_all_of_the_image_can_be_written_where_asked(start, tmp_path: Path, make) -> None:
    sandbox = await start(SandboxSpec("a", writable="image"), make=make)
    await output(sandbox, "echo x > /etc/new; echo y > /usr/bin/tool; rm -r /root; mkdir -p /opt/deep/er")
    assert await output(sandbox, "cat /etc/new /usr/bin/tool; cd /opt/deep/er; pwd") == "x\ny\n/opt/deep/er\n"
    # More than the 64 MiB of memory that --writable-tmpfs would have.
    assert await output(sandbox, "head -c 80000000 /dev/zero > /opt/large; stat -c %s /opt/large") == "80000000\n"
    await sandbox.stop()
    image = tmp_path / "image"
    assert not (image / "etc" / "new").exists() and (image / "root").is_dir()


@pytest.mark.apptainer
@pytest.mark.parametrize("make", [busybox_image, busybox_sif])
def test_an_ordinary_user_writes_over_the_image_and_is_nobody_else_for_it(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    with person("ordinary") as who:
        image = make(who.directory / "image")
        subprocess.run(["chown", "-R", str(who.uid), str(image)], check=True)
        for name, value in (("image", str(image)), ("writable", "image"), ("max_disk_mib", 256)):
            monkeypatch.setitem(SMALL_OF_PEOPLE, name, value)
        command = "echo x > /etc/new; cat /etc/new; rm -r /root; ls -d /root; grep CapEff /proc/self/status; > mine"
        (result,) = who.run("apptainer", [["a", "call", "bash", {"command": command}, 20]])
        assert result["output"].startswith("x\n") and "No such file" in result["output"], result
        assert "CapEff:\t0000000000000000" in result["output"]


@pytest.mark.apptainer
async def test_the_image_is_read_only_elsewhere(start) -> None:
    sandbox = await start(SandboxSpec("a"), make=busybox_image)
    for place in ("/etc/new", "/usr/bin/sh", "/new"):
        assert (await sandbox.call("bash", {"command": f"echo x > {place}"}, TIMEOUT_S)).exit_code == 1


@pytest.mark.apptainer
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user's")
async def test_a_directory_of_another_user_is_told(start, tmp_path: Path) -> None:
    def of_another(path: Path) -> Path:
        os.chown(busybox_image(path), 1234, 1234)
        return path

    with pytest.raises(SandboxError, match=r"belongs to another user: sandbox\.writable=image needs"):
        await start(SandboxSpec("a", writable="image"), make=of_another)


# --- the elder's name --------------------------------------------------------------------------------


@pytest.mark.apptainer
@pytest.mark.parametrize("writable", ["workspace", "image"])
async def test_singularity_will_do(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: str) -> None:
    """By its name alone: what stands behind it here is this machine's program, whichever that is."""
    shim = tmp_path / "singularity"
    shim.write_text(f'#!/bin/sh\nexec {find_binary()} "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setattr(container_binary, "BINARIES", (str(shim),))
    sandbox = await start(SandboxSpec("a", writable=writable), make=busybox_image)
    assert sandbox._process and await output(sandbox, "echo here; pwd") == "here\n/workspace\n"


def test_a_file_image_cannot_be_written_over_by_singularity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_hpc.sandbox.apptainer.os.getuid", lambda: 1234)
    sif = tmp_path / "image.sif"
    sif.touch()
    box = Box(tmp_path / "box")
    assert "--fakeroot" in overlay_flags(sif, box, "/usr/bin/apptainer")
    with pytest.raises(SandboxError, match=r"needs apptainer for the file .*sandbox\.unpack_images=true"):
        overlay_flags(sif, Box(tmp_path / "other"), "/usr/bin/singularity")


# --- no room ----------------------------------------------------------------------------------------


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(tmp_path)

    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        patched.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096, f_files=9, f_favail=9))
        with pytest.raises(
            SandboxError, match=r"No space left on device.*the file system of .* is full \(0 MiB free\)"
        ):
            holding.make_box()
    holding.release()


@pytest.mark.parametrize("state", ["empty", "text", "cut"])
async def test_a_damaged_image_is_told_before_anything_starts(runtime_dir: Path, tmp_path: Path, state: str) -> None:
    image = tmp_path / "image.sif"
    if state == "cut":
        await (await prepared("apptainer", runtime_dir)).close()
        whole = busybox_sif(tmp_path / "whole").read_bytes()
        image.write_bytes(whole[: len(whole) // 2])
    else:
        image.write_bytes(b"" if state == "empty" else b"no image at all\n" * 100)
    with pytest.raises(SandboxError, match=r"image.*(empty|not a SIF file|cut short).*pull or build it again"):
        await prepared("apptainer", runtime_dir, SandboxConfig(image=str(image)))
    assert list(runtime_dir.iterdir()) == []


# --- what a killed launcher leaves ------------------------------------------------------------------


@pytest.mark.apptainer
async def test_a_killed_launcher_leaves_no_helper(start, runtime_dir: Path) -> None:
    if shutil.which("squashfuse_ll") is None and shutil.which("squashfuse") is None:
        pytest.skip("squashfuse is not installed: .sif images are mounted some other way here")
    sandbox = await start(SandboxSpec("a", writable="image"), make=busybox_sif)
    launcher, box = sandbox._process.pid, sandbox._box.path
    soon = 4e9  # seconds since the epoch: all that is there
    assert {psutil.Process(pid).name() for pid in in_session(launcher, soon)} & HELPERS
    os.kill(launcher, signal.SIGKILL)
    await sandbox.ended()
    assert in_session(launcher, soon)
    await sandbox.stop()
    assert in_session(launcher, soon) == [] and not box.exists()


WORKER = """
import asyncio, sys
from pathlib import Path
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.sandbox.factory import make_runtime
from prorl_hpc.sandbox.protocol import SandboxSpec

async def main():
    runtime = await make_runtime(SandboxConfig(kind="apptainer", image=sys.argv[2]), Path(sys.argv[1]), "run")
    print((await runtime.start(SandboxSpec("a")))._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.apptainer
async def test_the_next_worker_ends_helpers_of_a_killed_worker_and_launcher(
    start, runtime_dir: Path, tmp_path: Path
) -> None:
    if shutil.which("squashfuse_ll") is None and shutil.which("squashfuse") is None:
        pytest.skip("squashfuse is not installed: .sif images are mounted some other way here")
    await (await prepared("apptainer", runtime_dir)).close()
    argv = [sys.executable, "-c", textwrap.dedent(WORKER), str(runtime_dir), str(busybox_sif(tmp_path / "image"))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
        assert worker.stdout is not None
        launcher = int(worker.stdout.readline())
        worker.send_signal(signal.SIGSTOP)
        os.kill(launcher, signal.SIGKILL)
        worker.kill()
    soon = 4e9
    helpers = [psutil.Process(pid) for pid in in_session(launcher, soon)]
    assert {process.name() for process in helpers} & HELPERS
    sweep(runtime_dir)
    _, alive = psutil.wait_procs(helpers, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
