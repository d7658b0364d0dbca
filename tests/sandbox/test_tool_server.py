"""The parts of the tool server that need no sandbox, and the server against a worker that misbehaves."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.sandbox import tools
from prorl_hpc.sandbox.local import SITE
from prorl_hpc.sandbox.tools import framing
from prorl_hpc.sandbox.tools.command import Command, Marks
from prorl_hpc.sandbox.tools.output import BoundedOutput
from prorl_hpc.sandbox.tools.terminal import Terminal
from prorl_hpc.sandbox.tools.toolset import MODULES, Refused, check_arguments

CODE = Path(tools.__file__).parent


def test_it_starts_without_what_is_slow_to_import() -> None:
    script = (
        "import sys; sys.path.append(sys.argv[1]); sys.path.insert(0, sys.argv[2])\n"
        "import prorl_hpc.sandbox.tools.server, prorl_hpc.sandbox.tools.shells\n"
        "print(*sys.modules)"
    )
    argv = [sys.executable, "-I", "-S", "-c", script, SITE, str(CODE.parents[2])]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    slow = {"asyncio", "dataclasses", "typing", "pathlib", "subprocess", "ctypes", "jupyter_client", "zmq", "msgspec"}
    assert loaded & slow == set()
    assert {f"prorl_hpc.sandbox.tools.{module}" for module in MODULES} & loaded == {"prorl_hpc.sandbox.tools.shells"}


# --- output and marks --------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300)), st.integers(1, 400))
def test_output_is_bounded_whatever_comes(pieces: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.add(piece)
    whole = b"".join(pieces)
    if len(whole) <= limit:
        assert output.text(strip_ansi=False) == whole.decode("utf-8", "replace")
    else:
        head, tail = whole[: limit - limit // 2], whole[len(whole) - limit // 2 :]
        mark = f"\n[... {len(whole) - limit} bytes of output left out here ...]\n"
        expected = head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace")
        assert output.text(strip_ansi=False) == expected


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.let_go()
    os.close(terminal.master)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_marks_are_found_however_the_stream_is_cut(terminal: Terminal, size: int) -> None:
    command = Command("true", Marks("0123456789abcdef"), terminal, 1000)
    command.script(0)
    stream = b"out\x01put \x0101234 \x010123456789abcdef:1:7:/a:b\x02 from the background"
    for start in range(0, len(stream), size):
        command.feed(stream[start : start + size])
    assert (command.done, command.exit_code, command.cwd) == (True, 7, "/a:b")
    assert command.output.text(strip_ansi=False) == "out\x01put \x0101234 "


def test_only_the_newest_mark_ends_a_command_and_the_first_tells_its_code(terminal: Terminal) -> None:
    marks = Marks("00ff")
    earlier = Command("true", marks, terminal, 1000)
    earlier.script(0)
    command = Command("true", marks, terminal, 1000)
    command.script(3)
    command.probe()
    command.feed(b"old\x0100ff:1:9:/\x02own\x0100ff:2:5:/\x02")
    assert not command.done and command.output.text() == "own"
    command.feed(b"\x0100ff:3:0:/\x02")
    assert command.done and command.exit_code == 5


def test_a_lost_mark_is_noticed_by_the_next_line(terminal: Terminal) -> None:
    marks = Marks("00ff")
    command = Command("true", marks, terminal, 1000)
    command.script(0)
    assert not command.has_fallback
    assert command.fallback() and command.has_fallback
    assert marks.last(b"prompt \x0100ff:2:7:/") is None
    assert marks.last(b"\x0100ff:1:1:/\x02 \x0100ff:2:7:/\x02 more") == (2, 7)
    assert not command.lost_its_mark(1, 7) and command.lost_its_mark(2, 7)
    command.probe()
    command.feed(b"output\x0100ff:3:0:/\x02")
    assert command.done and (command.exit_code, command.output.text()) == (7, "output")
    assert not command.lost_its_mark(2, 7)


def test_an_interrupt_before_the_next_line_was_written_ends_the_command(terminal: Terminal) -> None:
    command = Command("true", Marks("00ff"), terminal, 1000)
    command.script(0)
    command.probe()
    command.fallback()
    command.feed(b"output\x0100ff:2:130:/\x02")
    assert command.done and (command.exit_code, command.output.text()) == (130, "output")
    assert not command.lost_its_mark(3, 0)


def test_what_was_there_before_an_interactive_command_is_not_its_output() -> None:
    command = Command("true", Marks("00ff"), None, 1000)
    script = command.script(0).decode()
    assert "</dev/tty" in script and script.count("printf") == 2
    command.feed(b"$ prompt\x0100ff:1:0:/\x02own\x0100ff:2:0:/\x02")
    assert command.done and command.output.text() == "own"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the arguments are a list, not an object: bash takes command (str), keep (bool, else False)"),
        ({"command": True}, "argument command is a bool: bash takes"),
        ({}, "argument command is missing"),
        ({"command": "", "keep": 1}, "argument keep is a int"),
        ({"cmd": ""}, "unknown argument 'cmd'"),
    ],
)
def test_refusals_say_what_is_allowed(arguments: Any, words: str) -> None:
    with pytest.raises(Refused) as refused:
        check_arguments("bash", {"command": str, "keep": False}, arguments)
    assert words in str(refused.value)


# --- the server --------------------------------------------------------------------------------------


class Worker:
    """Speaks to one tool server, badly if need be."""

    def __init__(self, process: subprocess.Popen[bytes], peer: socket.socket, root: Path) -> None:
        self.process = process
        self.peer = peer
        self._root = root
        self._decoder = framing.Decoder()
        self._frames: list[tuple[dict[str, Any], bytes]] = []

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self.peer.sendall(framing.encode(header, body))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        while not self._frames:
            data = self.peer.recv(1 << 16)
            assert data, "the server hung up"
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def greet(self, version: int = framing.VERSION) -> dict[str, Any]:
        settings = {"root": str(self._root), "scratch": str(self._root), "env": {"PATH": os.environ["PATH"]}}
        settings |= {"inherit_env": False, "output_limit_bytes": 4096, "strip_ansi": True, "ipython_mode": "inprocess"}
        self.send({"hello": version, "settings": {**settings, "open_paths": False, "limits": {}}})
        return self.receive()[0]


@contextmanager
def served() -> Iterator[Worker]:
    root = Path(tempfile.mkdtemp(prefix="prorl-test-", dir="/tmp"))
    argv = [sys.executable, "-I", "-S", str(CODE / "start.py"), SITE, "", str(root / "socket")]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=root) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(30)
            peer.connect(str(root / "socket"))
            yield Worker(process, peer, root)
        process.stdin.close()
        process.wait(30)
    shutil.rmtree(root)


def test_calls_are_answered_in_the_order_in_which_they_end() -> None:
    with served() as worker:
        assert worker.greet() == {"hello": framing.VERSION}
        worker.send(
            {"id": 1, "tool": "bash", "arguments": {"command": "while [ ! -e go ]; do :; done"}, "timeout_s": 20}
        )
        frame = framing.encode({"id": 2, "tool": "upload", "arguments": {"path": "f"}, "timeout_s": 20}, b"content")
        for start in range(len(frame)):  # in pieces
            worker.peer.sendall(frame[start : start + 1])
        assert worker.receive()[0]["id"] == 2
        worker.send({"id": 3, "tool": "download", "arguments": {"path": "f"}, "timeout_s": 20})
        assert worker.receive()[1] == b"content"
        worker.send({"id": 4, "tool": "upload", "arguments": {"path": "go"}, "timeout_s": 20})
        assert {worker.receive()[0]["id"], worker.receive()[0]["id"]} == {1, 4}


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, struct.pack(">II", 4, 0) + b"abcd", struct.pack(">II", 2, 0) + b"[]"]
)
def test_garbage_ends_the_server_with_a_reason(garbage: bytes) -> None:
    with served() as worker:
        worker.greet()
        worker.peer.sendall(garbage)
        assert "no frame" in worker.receive()[0]["ended"]
        assert worker.process.wait(30) == 0


def test_another_version_is_refused() -> None:
    with served() as worker:
        assert "version 1" in worker.greet(version=1)["ended"]


def test_a_worker_that_takes_no_answers_does_not_hold_up_what_runs() -> None:
    with served() as worker:
        worker.greet()
        worker.send({"id": 1, "tool": "upload", "arguments": {"path": "f"}, "timeout_s": 20}, bytes(1 << 20))
        assert worker.receive()[0]["id"] == 1
        count = 40  # far more than the server keeps unsent
        for number in range(count):
            worker.send({"id": number, "tool": "download", "arguments": {"path": "f"}, "timeout_s": 20})
        worker.send({"id": 99, "tool": "bash", "arguments": {"command": "echo end"}, "timeout_s": 20})
        frames = [worker.receive() for _ in range(count + 1)]
        assert sorted(header["id"] for header, _ in frames) == [*range(count), 99]
        assert sum(len(body) for _, body in frames) == (count << 20) + 4


def test_a_worker_that_hangs_up_ends_it_with_all_it_started() -> None:
    with served() as worker:
        worker.greet()
        worker.send({"id": 1, "tool": "bash", "arguments": {"command": "sleep 661"}, "timeout_s": 700})
        worker.peer.close()
        assert worker.process.wait(30) == 0
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 661" not in listed
