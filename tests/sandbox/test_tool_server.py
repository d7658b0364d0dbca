"""The parts of the tool server that need no sandbox, and the shell it falls back to."""

from __future__ import annotations

import ast
from pathlib import Path

from sandbox_runtimes import prepared

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.sandbox import tool_server
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.sandbox.tool_server import BoundedOutput, Command, Refused, check_call

SOURCE = Path(tool_server.__file__).read_text()


def test_python_36_and_the_standard_library_suffice() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 6))
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    in_36 = {"base64", "binascii", "collections", "ctypes", "fcntl", "json", "os", "re", "resource", "selectors"}
    assert modules <= in_36 | {"shutil", "signal", "socket", "stat", "struct", "sys", "termios", "time", "typing"}
    for name in ("removeprefix", "pidfd", "text=True", "capture_output", "math.prod", "annotations"):
        assert name not in SOURCE


def test_output_is_bounded_whatever_comes() -> None:
    for limit in (1, 2, 100, 101):
        output = BoundedOutput(limit)
        for number in range(5000):
            output.add(b"%04d " % number * 50)
        kept = output.text().replace("\n", " ").split("[...")
        assert "left out" in output.text() and len(kept[0]) <= limit + 1
        assert len(output._tail) <= limit
    whole = BoundedOutput(10)
    whole.add(b"12345")
    whole.add(b"67890")
    assert whole.text() == "1234567890"
    whole.add(b"x")
    assert whole.text() == "12345\n[... 1 bytes of output left out here ...]\n7890x"


def test_marks_are_found_however_the_stream_is_cut() -> None:
    command = Command("true", 1000, 0)
    script = command.script().decode()
    nonce = script.split("\\001")[1].split(":")[0]
    stream = f"out\x01put \x01{nonce[:5]} \x01{nonce}:1:7\x02 from the background".encode()
    for size in (1, 2, 3, 7, len(stream)):
        part = Command("true", 1000, 0)
        part._nonce, part._serial = nonce, 1
        for start in range(0, len(stream), size):
            part.feed(stream[start : start + size])
        assert (part.done, part.exit_code, part.output.text()) == (True, 7, f"output {nonce[:5]} ")
        tool_server.os.close(part.master)
        part.close_slave()
    command.close_slave()
    tool_server.os.close(command.master)


def test_an_old_mark_does_not_end_a_command() -> None:
    command = Command("true", 1000, 0)
    command.script()
    command.probe()
    command.feed(f"\x01{command._nonce}:1:0\x02".encode())
    assert not command.done
    command.feed(f"\x01{command._nonce}:2:130\x02".encode())
    assert command.done and command.exit_code == 130
    command.close_slave()
    tool_server.os.close(command.master)


def test_refusals_say_what_is_allowed() -> None:
    cases = {
        ("rm", "{}"): "unknown tool 'rm': there are bash, read_file, write_file",
        ("bash", "[]"): "the arguments are a list, not an object: bash takes command (str)",
        ("bash", "{'command': True}"): "argument command is a bool: bash takes command (str)",
        ("write_file", "{'path': 'a'}"): "argument content is missing",
        ("bash", "{'command': 'a\\0b'}"): "NUL",
    }
    for (tool, arguments), words in cases.items():
        try:
            check_call(tool, ast.literal_eval(arguments))
        except Refused as error:
            assert words in str(error)
        else:
            raise AssertionError(f"{tool} {arguments} was not refused")


async def test_sh_serves_where_there_is_no_bash(runtime_dir: Path) -> None:
    runtime = await prepared("local", runtime_dir, SandboxConfig())
    sandbox = await runtime.start(SandboxSpec("a", env={"PATH": "/nonexistent"}))

    async def sh(command: str, timeout_s: float = 30.0) -> tuple[str, int | None]:
        result = await sandbox.call("bash", {"command": command}, timeout_s)
        return result.output, result.exit_code

    assert (await sh("echo $0; PATH=/usr/bin:/bin; cd /; x=5; false"))[1] == 1
    assert await sh("echo $? $x $PWD '" + "a" * 10000 + "'") == ("1 5 / " + "a" * 10000 + "\n", 0)
    assert (await sh("if"))[1] == 2
    assert (await sh("echo 'é\tb'; exit 4"))[0].startswith("é\tb\n")
    for command in ("while :; do :; done", "/bin/sleep 600"):
        assert (await sh(command, 0.2))[1] is None
        assert await sh("echo ok") == ("ok\n", 0)
    await runtime.close()
