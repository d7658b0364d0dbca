"""``upload`` and ``download``, and the ways out of the workspace that every file tool has to refuse."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_runtimes import SMALL, prepared
from test_editor import host

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, ToolResult
from prorl_hpc.sandbox.tools import editor, files
from prorl_hpc.sandbox.tools.framing import MAX_BODY_BYTES
from prorl_hpc.sandbox.tools.toolset import Call, Refused
from prorl_hpc.sandbox.tools.workspace import Workspace

TIMEOUT_S = 30.0


@pytest.fixture
async def sandbox(runtime: AttachedRuntime) -> Sandbox:
    return await runtime.start(SandboxSpec("a"))


async def bash(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.call("bash", {"command": command}, TIMEOUT_S)
    assert result.exit_code == 0, result
    return result.output


async def every_tool(sandbox: Sandbox, path: str) -> list[tuple[str, ToolResult]]:
    """All that take a path, tried on this one."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("upload", {"path": path}),
        ("upload", {"path": path, "append": True}),
        ("download", {"path": path}),
        ("search", {"pattern": "root", "path": path}),
        ("patch", {"path": path}),
        ("edit", {"command": "view", "path": path}),
        ("edit", {"command": "create", "path": path, "text": "x"}),
        ("edit", {"command": "str_replace", "path": path, "old": "root", "new": "x"}),
        ("edit", {"command": "insert", "path": path, "line": 0, "text": "x"}),
        ("edit", {"command": "undo", "path": path}),
    ]
    return [(str(call), await sandbox.call(*call, TIMEOUT_S)) for call in calls]


@pytest.fixture
def outside(runtime_dir: Path) -> Iterator[Path]:
    """A file of the node, beside the sandboxes."""
    path = runtime_dir / "secret"
    path.write_text("root of all secrets\n")
    yield path
    assert path.read_text() == "root of all secrets\n" and os.listdir(path.parent).count("secret") == 1  # noqa: PTH208
    path.unlink()


async def test_nothing_leads_out_of_the_workspace(sandbox: Sandbox, outside: Path) -> None:
    await bash(
        sandbox,
        f"ln -s {outside} link; ln -s {outside.parent} dir; ln -s / top; ln -s link twice; mkdir in; ln -s ../.. in/up;"
        "ln -s /proc/self/root proc; ln -s /etc/passwd passwd; ln -s $PWD/in here",
    )
    for path in (
        *(str(outside), f"../../../../../../../..{outside}", "link", f"dir/{outside.name}", f"top{outside}", "twice"),
        *("in/up/x", f"proc{outside}", "passwd", "/etc/passwd", "/workspace/../etc/passwd", "/proc/1/environ", "../x"),
        *("/.prorl/x", "dir/new", "top/new", "in/../../x"),
    ):
        for call, result in await every_tool(sandbox, path):
            assert result.exit_code == 2 and "leaves the workspace" in result.output, (call, result)
    await sandbox.upload("here/fine", b"x")
    assert await bash(sandbox, "cat in/fine") == "x"


async def test_what_is_no_file_is_refused(sandbox: Sandbox) -> None:
    await bash(
        sandbox,
        "mkfifo fifo; mkdir dir; ln -s loop loop; touch file; ln -s fifo tofifo;"
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")' || touch skip; ls",
    )
    for path, reason in (
        ("fifo", "FIFO"),
        ("tofifo", "FIFO"),
        ("dir", "directory"),
        ("dir/", "directory"),
        ("loop", "symbolic link"),
        ("file/x", "Not a directory"),
        ("socket", "socket"),
        ("x" * 256, "File name too long"),
        ("y/" * 2500 + "f", "File name too long"),
        ("a\0b", "NUL"),
        ("\ud800", "no file name can"),
    ):
        for tool in ("upload", "download"):
            result = await sandbox.call(tool, {"path": path}, TIMEOUT_S)
            assert result.exit_code == 2 and reason in result.output, (tool, path, result)
            assert len(result.output) < 500
    result = await sandbox.call("download", {"path": "no/such"}, TIMEOUT_S)
    assert result.exit_code == 2 and "No such file" in result.output


async def test_any_name_that_the_system_takes_is_taken(sandbox: Sandbox) -> None:
    for name in ("a\nb", " ", "-rf", "ü", "\udcff", "n" * 255, "d/" * 200 + "deep", "*", "back\\slash", "~"):
        await sandbox.upload(name, name.encode("utf-8", "surrogateescape"))
        assert await sandbox.download(name) == name.encode("utf-8", "surrogateescape")
    assert await bash(sandbox, "ls -b | head -3; cat $'\\xff' | od -An -tx1") == "\\ \n*\n-rf\n ff\n"


async def test_chunks(sandbox: Sandbox) -> None:
    content = os.urandom(100_000)
    await sandbox.upload("f", content)
    for arguments, wanted in (
        ({}, content),
        ({"offset": 99_990}, content[99_990:]),
        ({"offset": 10, "length": 5}, content[10:15]),
        ({"offset": 200_000}, b""),
        ({"length": 0}, b""),
    ):
        response = await sandbox._connected().call("download", {"path": "f", **arguments}, TIMEOUT_S)  # type: ignore[attr-defined]
        assert response.body == wanted
    for arguments in ({"offset": -1}, {"length": -1}, {"length": MAX_BODY_BYTES + 1}, {"offset": 1 << 70}):
        refused = await sandbox.call("download", {"path": "f", **arguments}, TIMEOUT_S)
        assert refused.exit_code == 2 and "offset" in refused.output


async def test_a_file_that_would_be_too_large_is_refused_whole(sandbox: Sandbox) -> None:
    limit = SMALL.max_file_mib << 20
    await sandbox.upload("f", b"x" * limit)
    with pytest.raises(SandboxError, match=f"at most {limit}"):
        await sandbox._own_call("upload", {"path": "f", "append": True}, b"y")  # type: ignore[attr-defined]
    assert await bash(sandbox, "wc -c < f") == f"{limit}\n"
    assert (await sandbox.call("bash", {"command": "echo still here"}, TIMEOUT_S)).output == "still here\n"


async def test_a_download_passes_a_long_command_by(sandbox: Sandbox) -> None:
    content = os.urandom(6 << 20)
    await sandbox.upload("big", content)
    await bash(sandbox, "mkfifo gate")
    waiting = asyncio.create_task(bash(sandbox, "read line < gate; echo $line"))
    assert await sandbox.download("big") == content
    assert not waiting.done()
    await sandbox.call("bash", {"command": "echo end > gate", "shell": "other"}, TIMEOUT_S)
    assert await waiting == "end\n"


# --- hard links -----------------------------------------------------------------------------------


def download(root: Path, path: str, **settings: Any) -> bytes:
    output = files.Tools(host(root, **settings)).download(Call(1, "download", 10, b""), path).output
    assert isinstance(output, bytes)
    return output


def test_a_hard_link_to_outside_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (root / "hard").hardlink_to(tmp_path / "secret")
    with pytest.raises(Refused, match=r"2 names \(hard links\), of which 1"):
        download(root, "hard")
    with pytest.raises(Refused, match="hard links"):
        files.Tools(host(root)).upload(Call(1, "upload", 10, b"x"), "hard")
    assert (tmp_path / "secret").read_text() == "secret"
    (root / "mine").write_text("mine")
    (root / "sub/also").hardlink_to(root / "mine")
    assert download(root, "sub/also") == b"mine"
    assert download(root, "hard", open_paths=True) == b"secret"


@pytest.mark.apptainer
async def test_in_a_container_no_hard_link_crosses_a_mount(runtime_dir: Path) -> None:
    runtime = await prepared("apptainer", runtime_dir)
    sandbox = await runtime.start(SandboxSpec("a"))
    command = "for f in /etc/passwd /usr/bin/env /proc/self/environ; do ln $f l || ln -L $f l; done; touch /tmp/f; ln /tmp/f l"
    result = await sandbox.call("bash", {"command": command}, TIMEOUT_S)
    assert result.exit_code != 0 and await bash(sandbox, "ls") == ""
    await runtime.close()


# --- races ----------------------------------------------------------------------------------------


def test_a_directory_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:
    """Somebody inside swaps a directory and a link for each other as fast as possible while files are written below."""
    root, away = tmp_path / "root", tmp_path / "away"
    (root / "d").mkdir(parents=True)
    away.mkdir()
    (away / "f").write_text("outside")
    (root / "link").symlink_to(away)
    over = threading.Event()

    def swap() -> None:
        here, exchange = -100, 2
        libc = ctypes.CDLL(None)
        while not over.is_set():
            libc.renameat2(here, os.fsencode(root / "d"), here, os.fsencode(root / "link"), exchange)

    swapper = threading.Thread(target=swap)
    swapper.start()
    tools = files.Tools(host(root))
    refused = written = 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            tools.upload(Call(1, "upload", 10, b"inside"), "d/f")
            assert tools.download(Call(1, "download", 10, b""), "d/f").output == b"inside"
            written += 1
        except Refused:
            refused += 1
    over.set()
    swapper.join()
    assert (away / "f").read_text() == "outside" and [p.name for p in away.iterdir()] == ["f"]
    assert written and refused


def test_a_link_that_appears_after_the_check_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    workspace = Workspace(host(root))
    with workspace.place("d/f") as place:
        (root / "d/f").symlink_to(tmp_path / "secret")
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
            with pytest.raises(Refused, match="symbolic link that was put there"):
                workspace.open_at(place, flags)
    assert (tmp_path / "secret").read_text() == "secret"


# --- when it may leave, and when there is no room -------------------------------------------------


def test_open_paths_lets_files_be_anywhere_but_only_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "f").write_text("f")
    os.mkfifo(tmp_path / "fifo")
    assert download(root, "../f", open_paths=True) == b"f" == download(root, str(tmp_path / "f"), open_paths=True)
    (root / "in").write_text("in")
    assert download(root, "/workspace/in", open_paths=True) == b"in"
    for path in ("/dev/zero", str(tmp_path / "fifo"), "/", "/tmp"):
        with pytest.raises(Refused):
            download(root, path, open_paths=True)


@pytest.mark.apptainer
async def test_a_read_only_place_is_said(runtime_dir: Path) -> None:
    runtime = await prepared("apptainer", runtime_dir, replace(SMALL, open_paths=True))
    sandbox = await runtime.start(SandboxSpec("a"))
    await sandbox.upload("/tmp/x", b"x")
    assert await sandbox.download("/tmp/x") == b"x"
    for tool, arguments in (
        ("upload", {"path": "/usr/new/x"}),
        ("edit", {"command": "create", "path": "/usr/x", "text": "x"}),
        ("edit", {"command": "insert", "path": "/usr/bin/which", "line": 0, "text": "x"}),
    ):
        result = await sandbox.call(tool, arguments, TIMEOUT_S)
        assert result.exit_code == 2, result
        assert "Read-only file system" in result.output or "Permission denied" in result.output, result
    await runtime.close()


@contextmanager
def small_files() -> Iterator[None]:
    """A limit of the system's own on the size of files, as a disk that is full. It is pytest's too, which must be able to
    write its report."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_whole_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with small_files():
        write_too_much(tmp_path)
    assert not (tmp_path / "g").exists()


def write_too_much(tmp_path: Path) -> None:
    tools, edit = files.Tools(host(tmp_path)), editor.Tools(host(tmp_path))
    tools.upload(Call(1, "upload", 10, b"a\n" * 4000), "f")
    with pytest.raises(Refused, match="File too large"):
        tools.upload(Call(1, "upload", 10, b"b" * 4000), "f", append=True)
    for names in (1, 2):
        with pytest.raises(Refused, match="File too large"):
            edit.edit(Call(1, "edit", 10, b""), "insert", "f", line=4000, text="b" * 4000)
        assert (tmp_path / "f").read_bytes() == b"a\n" * 4000
        assert len(list(tmp_path.iterdir())) == names
        if names == 1:
            (tmp_path / "second").hardlink_to(tmp_path / "f")
    with pytest.raises(Refused, match="File too large"):
        edit.edit(Call(1, "edit", 10, b""), "create", "g", text="b" * 11_000)
