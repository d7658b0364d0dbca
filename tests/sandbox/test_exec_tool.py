"""``exec``: a program by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec

TIMEOUT_S = 30.0


@pytest.fixture
async def sandbox(runtime: AttachedRuntime) -> Sandbox:
    return await runtime.start(SandboxSpec("a"))


async def test_a_program_gets_its_arguments_and_its_input(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["printf", "%s|", "a b", "$x", "'", "é\n"], TIMEOUT_S)
    assert (result.output, result.exit_code) == ("a b|$x|'|é\n|", 0)
    assert (
        await sandbox.exec(["sh", "-c", "cat; echo err >&2; exit 7"], TIMEOUT_S, stdin=b"in\n")
    ).output == "in\nerr\n"
    assert (await sandbox.exec(["wc", "-c"], TIMEOUT_S, stdin=bytes(3_000_000))).output.split() == ["3000000"]
    assert (await sandbox.exec(["true"], TIMEOUT_S, stdin=bytes(3_000_000))).exit_code == 0


async def test_directory_and_environment(sandbox: Sandbox) -> None:
    await sandbox.call("bash", {"command": "mkdir -p d; cd d; export X=shell"}, TIMEOUT_S)
    assert Path((await sandbox.exec(["pwd"], TIMEOUT_S, cwd="d")).output.strip()).name == "d"
    assert (await sandbox.exec(["pwd"], TIMEOUT_S, cwd="/usr")).output == "/usr\n"
    arguments = {"argv": ["sh", "-c", "echo $X $Y $HOME"], "env": {"Y": "given"}}
    assert (await sandbox.call("exec", arguments, TIMEOUT_S)).output.startswith("given /")


async def test_a_directory_that_is_not_there_is_what_is_said(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["ls"], TIMEOUT_S, cwd="/nope")
    assert (result.output, result.exit_code) == (
        "ls was not started: the directory /nope: No such file or directory\n",
        126,
    )


async def test_exit_codes(sandbox: Sandbox) -> None:
    for argv, code in (
        (["false"], 1),
        (["sh", "-c", "exit 9"], 9),
        (["sh", "-c", "kill -9 $$"], 137),
        (["nonsense_xyz"], 127),
        (["/"], 126),
    ):
        assert (await sandbox.exec(argv, TIMEOUT_S)).exit_code == code, argv


async def test_output_is_cut_with_a_mark(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["sh", "-c", "echo first; head -c 3000000 /dev/zero | tr '\\0' z; echo; echo last"], 30)
    assert result.output.startswith("first\n") and result.output.endswith("last\n")
    assert "bytes of output left out" in result.output and len(result.output) < 4096 + 100


async def test_at_the_limit_all_that_it_started_ends(sandbox: Sandbox) -> None:
    script = "echo shown; (sleep 641 &); setsid sleep 642 & (setsid sh -c 'sleep 643; true' &); sleep 644"
    result = await sandbox.exec(["bash", "-c", script], 0.5)
    assert (result.exit_code, result.timed_out) == (None, True)
    assert result.output.startswith("shown\n") and "timed out" in result.output
    seen = await sandbox.call("bash", {"command": "ps -eo args | grep -c '^sleep 64[1-4]'"}, TIMEOUT_S)
    assert seen.output == "0\n"


async def test_it_holds_up_nobody_and_can_be_cancelled(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.exec(["sleep", "651"], 700))
    assert (await sandbox.call("bash", {"command": "echo meanwhile"}, TIMEOUT_S)).output == "meanwhile\n"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.sleep(0.2)
    seen = await sandbox.call("bash", {"command": "ps -eo args | grep -c '^sleep 651'"}, TIMEOUT_S)
    assert seen.output == "0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        {"argv": []},
        {"argv": [1]},
        {"argv": "ls"},
        {"argv": ["a\0b"]},
        {"argv": ["ls"], "env": {"A=B": "x"}},
        {"argv": ["ls"], "env": {"A": 1}},
    ],
)
async def test_wrong_calls_are_refused(sandbox: Sandbox, arguments: dict[str, object]) -> None:
    result = await sandbox.call("exec", arguments, TIMEOUT_S)
    assert result.exit_code == 2 and "exec" in result.output
