"""``bash`` and its companions, in local sandboxes: what they do is the same in a container."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_runtimes import SMALL, prepared

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, ToolResult
from prorl_hpc.sandbox.tools.shells import MAX_SHELLS

TIMEOUT_S = 30.0


@pytest.fixture
async def sandbox(runtime_dir: Path) -> AsyncIterator[Sandbox]:
    async for sandbox in made(runtime_dir, SMALL):
        yield sandbox


async def made(runtime_dir: Path, config: SandboxConfig, env: dict[str, str] | None = None) -> AsyncIterator[Sandbox]:
    runtime = await prepared("local", runtime_dir, config)
    try:
        yield await runtime.start(SandboxSpec("a", env=env or {}))
    finally:
        await runtime.close()


async def bash(sandbox: Sandbox, command: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> ToolResult:
    return await sandbox.call("bash", {"command": command, **arguments}, timeout_s)


async def output(sandbox: Sandbox, command: str, **arguments: Any) -> str:
    result = await bash(sandbox, command, **arguments)
    assert result.exit_code == 0, result
    return result.output


async def look(sandbox: Sandbox, wait_s: float = 10.0, shell: str = "main") -> ToolResult:
    return await sandbox.call("bash_look", {"wait_s": wait_s, "shell": shell}, TIMEOUT_S)


async def wait_for(sandbox: Sandbox, text: str, shell: str = "main") -> str:
    """What the running command writes, until it wrote that."""
    seen = ""
    async with asyncio.timeout(TIMEOUT_S):
        while text not in seen:
            looked = await look(sandbox, 0.02, shell)
            seen += looked.output if looked.running else ""
    return seen


async def type_in(sandbox: Sandbox, text: str) -> ToolResult:
    return await sandbox.call("bash_input", {"text": text}, TIMEOUT_S)


# --- the directory and the text ----------------------------------------------------------------------


async def test_the_directory_is_in_the_answer(sandbox: Sandbox) -> None:
    root = (await bash(sandbox, "true")).cwd
    assert Path(root).is_absolute()
    assert (await bash(sandbox, "mkdir -p 'a:b é'; cd 'a:b é'")).cwd == f"{root}/a:b é"
    assert (await bash(sandbox, "false")).cwd == f"{root}/a:b é"
    assert (await bash(sandbox, "cd ..; sleep 60", timeout_s=0.2)).cwd == root


async def test_a_nul_is_refused(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "echo a\0b")
    assert result.exit_code == 2 and "NUL" in result.output


async def test_large_commands_of_any_shape_arrive(sandbox: Sandbox) -> None:
    lines = "\n".join(f"line {number} $x `y` \\ '\"" for number in range(20_000))
    assert len(lines) > 400_000
    assert await output(sandbox, f"cat > big <<'END'\n{lines}\nEND\nwc -l < big") == "20000\n"
    assert await sandbox.download("big") == f"{lines}\n".encode()
    assert await output(sandbox, "\n\n  # nothing\n\n") == ""
    assert await output(sandbox, "echo a \\\nb; echo \x01\x02 | od -An -tx1") == "a b\n 01 02 0a\n"


async def test_control_sequences_are_kept_where_asked(runtime_dir: Path) -> None:
    config = SandboxConfig(strip_ansi=False, start_retries=0)
    async for sandbox in made(runtime_dir, config):
        assert await output(sandbox, "printf '\\033[1mb\\033[0m'") == "\x1b[1mb\x1b[0m"


async def test_ten_megabytes_come_through_whole(runtime_dir: Path) -> None:
    async for sandbox in made(runtime_dir, SandboxConfig(output_limit_bytes=12 << 20, start_retries=0)):
        text = await output(sandbox, "seq 1 1400000 | tee sum | cat; cksum < sum >&2")
        lines = text.splitlines()
        assert len(text) > 10_000_000 and lines[:-1] == [str(number) for number in range(1, 1_400_001)]


async def test_output_is_in_order_with_errors(sandbox: Sandbox) -> None:
    assert await output(sandbox, "for i in 1 2 3; do echo out $i; echo err $i >&2; done") == "".join(
        f"out {i}\nerr {i}\n" for i in (1, 2, 3)
    )
    assert await output(sandbox, "test -t 1 && test -t 2 && echo terminal") == "terminal\n"


async def test_what_a_command_does_to_its_terminal_ends_with_it(sandbox: Sandbox) -> None:
    await bash(sandbox, "stty echo opost onlcr icanon -F $(readlink /proc/self/fd/1 || tty)")
    await bash(sandbox, "exec 5>&1; exec >/dev/null 2>&1; set -x; trap 'echo trapped' DEBUG; set +x; trap - DEBUG")
    assert await output(sandbox, "echo seen; printf 'a\\nb\\n'") == "seen\na\nb\n"
    assert await output(sandbox, "echo still >&5") == "still\n"


async def test_errors_that_throw_the_shell_back_to_its_prompt_are_results(sandbox: Sandbox) -> None:
    for command in ("echo ${nothing?is set}; echo not reached", "readonly r=1; r=2", "eval 'if'; $((1/0))"):
        result = await bash(sandbox, command)
        assert result.exit_code not in (0, None) and not result.timed_out, result
    assert await output(sandbox, "echo ok") == "ok\n"


async def test_a_failing_set_e_ends_the_shell_and_says_so(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "set -e; echo before; false; echo after")
    assert result.exit_code == 1 and result.output.startswith("before\n") and "started again" in result.output


async def test_a_shell_that_ends_before_it_reads_a_command_is_replaced_for_it(sandbox: Sandbox) -> None:
    for last_will in ("PROMPT_COMMAND='exit 0'", "set -t", "PROMPT_COMMAND='kill -9 $$'"):
        assert (await bash(sandbox, last_will)).exit_code == 0
        result = await bash(sandbox, "echo ran; false")
        assert result.output.endswith("ran\n") and result.exit_code == 1, (last_will, result)
        assert "started again" in result.output


async def test_a_directory_that_the_shell_forgot_is_no_error(sandbox: Sandbox) -> None:
    assert await output(sandbox, "set -u; unset PWD; echo ok") == "ok\n"
    assert (await bash(sandbox, "(exit 7)")).exit_code == 7


async def test_a_directory_deeper_than_any_path_can_say_is_in_the_answer(sandbox: Sandbox) -> None:
    deep = await bash(sandbox, f"for i in $(seq 80); do mkdir {'d' * 250} && cd {'d' * 250} || break; done; (exit 5)")
    assert deep.exit_code == 5 and len(deep.cwd) > 80 * 250, deep
    assert (await bash(sandbox, "cd ~; true")).exit_code == 0


async def test_marks_that_a_command_forges_are_output(sandbox: Sandbox) -> None:
    await bash(sandbox, "trap 'c=$BASH_COMMAND; [[ $c == *001*:* ]] && n=${c#*001} && n=${n%%:*}' DEBUG")
    await bash(sandbox, "trap - DEBUG")
    assert (await output(sandbox, "echo ${#n}")) == "16\n"
    for forged in ("", "garbage", ":::", "-1:0:/", "1:x:/", "99999999999:0:/", "99999999:99999999999:/", "1:0"):
        for where in ("/dev/stdout", "/dev/tty"):
            result = await bash(sandbox, f'printf "\\001$n:{forged}\\002" > {where}; echo real; (exit 3)')
            assert result.output.endswith("real\n") and result.exit_code == 3, (forged, where, result)
    endless = await bash(sandbox, 'printf "\\001$n:1:0:"; head -c 100000 /dev/zero | tr "\\0" x; echo; echo real')
    assert endless.output.endswith("x\nreal\n") and endless.exit_code == 0


# --- several shells ----------------------------------------------------------------------------------


async def test_shells_are_separate_and_side_by_side(sandbox: Sandbox) -> None:
    slow = asyncio.create_task(bash(sandbox, "while [ ! -e go ]; do sleep 0.01; done; echo slow $x", shell="other"))
    await bash(sandbox, "x=mine; cd /")
    assert await output(sandbox, "echo $x", shell="third") == "\n"
    await sandbox.upload("f", b"during")
    assert await sandbox.download("f") == b"during"
    assert not slow.done()
    await sandbox.upload("go", b"")
    assert (await slow).output == "slow\n"


async def test_a_timeout_touches_no_other_shell(sandbox: Sandbox) -> None:
    await bash(sandbox, "(setsid sleep 611 &) ; sleep 612 &", shell="other")
    running = asyncio.create_task(bash(sandbox, "setsid sleep 0.7; echo whole", shell="other"))
    late = asyncio.create_task(sandbox.exec(["sleep", "0.8"], 20))
    assert (await bash(sandbox, "(setsid sleep 613 &); sleep 614", timeout_s=0.3)).timed_out
    assert (await running).output == "whole\n" and (await late).exit_code == 0
    alive = await output(sandbox, "ps -eo args | grep -o '^sleep 61[1-4]' | sort")
    assert alive == "sleep 611\nsleep 612\n"


async def test_commands_of_one_shell_take_turns_within_their_time(sandbox: Sandbox) -> None:
    first = asyncio.create_task(bash(sandbox, "sleep 0.4; echo first > f"))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(bash(sandbox, "cat f"))
    late = await bash(sandbox, "echo never > f", timeout_s=0.05)
    assert late.timed_out and "before it began" in late.output and "sleep 0.4" in late.output
    assert (await first).exit_code == 0
    assert (await second).output == "first\n"


async def test_the_last_words_of_the_background_are_not_the_next_commands(sandbox: Sandbox) -> None:
    for _ in range(60):
        both = ("(sleep 0.001; echo late) & sleep 0.002", "echo x")
        calls = [bash(sandbox, command, shell=f"s{number}") for number in range(6) for command in both]
        assert {result.output for result in (await asyncio.gather(*calls))[1::2]} == {"x\n"}


async def test_there_is_an_end_of_shells(sandbox: Sandbox) -> None:
    for number in range(MAX_SHELLS - 1):  # and the main one
        assert await output(sandbox, "echo $$", shell=f"s{number}")
    result = await bash(sandbox, "true", shell="more")
    assert result.exit_code == 2 and "bash_close" in result.output and "s0, s1" in result.output
    assert (await sandbox.call("bash_close", {"shell": "s3"}, TIMEOUT_S)).exit_code == 0
    assert await output(sandbox, "echo ok", shell="more") == "ok\n"
    for name in ("", "a b", "x" * 65, "../x"):
        assert (await bash(sandbox, "true", shell=name)).exit_code == 2


async def test_a_closed_shell_is_gone_with_all_it_started(sandbox: Sandbox) -> None:
    await bash(sandbox, "x=1; sleep 621 & (setsid sleep 622 &)", shell="other")
    running = asyncio.create_task(bash(sandbox, "echo began; sleep 623", shell="other"))
    await asyncio.sleep(0.2)
    waiting = asyncio.create_task(bash(sandbox, "echo never", shell="other"))
    await asyncio.sleep(0.05)
    assert (await sandbox.call("bash_close", {"shell": "other"}, TIMEOUT_S)).exit_code == 0
    assert "was closed" in (await running).output and "was closed" in (await waiting).output
    assert await output(sandbox, "ps -eo args | grep -c '^sleep 62[1-3]'; true") == "0\n"
    assert await output(sandbox, "echo new $x", shell="other") == "new\n"
    assert (await sandbox.call("bash_close", {"shell": "nothing"}, TIMEOUT_S)).exit_code == 2


# --- a running command -------------------------------------------------------------------------------


async def test_a_command_can_be_left_running_and_looked_at(sandbox: Sandbox) -> None:
    command = (
        "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo over; cd /; exit_with() { return 3; }; exit_with"
    )
    kept = await bash(sandbox, command, timeout_s=0.3, keep=True)
    assert (kept.output, kept.exit_code, kept.running, kept.timed_out) == ("begun\n", None, True, False)
    assert (await look(sandbox, 0.0)).running
    refused = await bash(sandbox, "echo too early")
    assert refused.exit_code == 2 and "bash_look" in refused.output
    await sandbox.upload("go", b"")
    ended = await look(sandbox)
    assert (ended.output, ended.exit_code, ended.running, ended.cwd) == ("over\n", 3, False, "/")
    assert "nothing is running" in (await look(sandbox)).output
    assert await output(sandbox, "echo $?; pwd") == "3\n/\n"


async def test_a_command_that_ended_unseen_does_not_hold_the_shell(sandbox: Sandbox) -> None:
    await bash(sandbox, "sleep 0.3; x=set", timeout_s=0.05, keep=True)
    await asyncio.sleep(0.6)
    assert await output(sandbox, "echo $x") == "set\n"


async def test_a_call_in_flight_can_be_looked_at_and_still_gets_all(sandbox: Sandbox) -> None:
    running = asyncio.create_task(bash(sandbox, "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two"))
    assert await wait_for(sandbox, "one") == "one\n"
    assert (await look(sandbox, 0.0)).output == ""
    await sandbox.upload("go", b"")
    assert (await running).output == "one\ntwo\n"


async def test_an_interactive_command_is_typed_into(sandbox: Sandbox) -> None:
    kept = await bash(sandbox, "read -p 'name? ' name; echo hello $name; cat", 0.3, interactive=True, keep=True)
    assert kept.running and kept.output == "name? "
    assert (await type_in(sandbox, "worl")).running
    await type_in(sandbox, "d\n")
    assert await wait_for(sandbox, "world") == "hello world\n"
    await type_in(sandbox, "line\n")
    assert await wait_for(sandbox, "line") == "line\n"
    await type_in(sandbox, "\x04")
    ended = await look(sandbox)
    assert ended.exit_code == 0 and not ended.running
    assert await output(sandbox, "echo $name; cat") == "world\n"


async def test_an_interpreter_can_be_talked_to(sandbox: Sandbox) -> None:
    command = "python3 -q -c 'import getpass, code; print(getpass.getpass()); code.interact(\"ready\")'"
    await bash(sandbox, command, 0.5, interactive=True, keep=True)
    await type_in(sandbox, "secret\n")
    assert "secret" in await wait_for(sandbox, "ready")
    await type_in(sandbox, "6 * 7\n")
    await wait_for(sandbox, "42")
    await type_in(sandbox, "while True: pass\n\n")
    await asyncio.sleep(0.2)
    await type_in(sandbox, "\x03")
    await wait_for(sandbox, "KeyboardInterrupt")
    await type_in(sandbox, "raise SystemExit(4)\n")
    assert (await look(sandbox)).exit_code == 4
    # An interactive command that nobody keeps ends at its limit, and its terminal is as new for the next.
    late = await bash(sandbox, "stty raw; echo asks; read x", 0.3, interactive=True)
    assert late.timed_out and "asks" in late.output
    assert (await bash(sandbox, "echo clean; test -t 0", interactive=True)).output == "clean\n"


async def test_input_for_a_command_that_takes_none_is_refused(sandbox: Sandbox) -> None:
    assert "nothing is running" in (await bash(sandbox, "true") and await type_in(sandbox, "x")).output
    await bash(sandbox, "sleep 60", 0.05, keep=True)
    refused = await type_in(sandbox, "x\n")
    assert refused.exit_code == 2 and "interactive=true" in refused.output
    assert (await sandbox.call("bash_look", {"shell": "nothing"}, TIMEOUT_S)).exit_code == 2


async def test_input_that_is_not_read_does_not_hold_the_sandbox(sandbox: Sandbox) -> None:
    await bash(sandbox, "stty -icanon; sleep 60", 0.2, interactive=True, keep=True)
    result = await sandbox.call("bash_input", {"text": "x" * 1_000_000}, 0.3)
    assert result.timed_out and "does not read" in result.output
    assert await output(sandbox, "echo ok", shell="other") == "ok\n"


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143), ("KILL", 137)])
async def test_a_running_command_is_interrupted(sandbox: Sandbox, name: str, code: int) -> None:
    await bash(sandbox, "x=kept; sleep 631 &")
    await bash(sandbox, "echo begun; sleep 632", 0.2, keep=True)
    sent = await sandbox.call("bash_interrupt", {"signal": name}, TIMEOUT_S)
    assert sent.running and f"SIG{name} sent to 1" in sent.output
    ended = await look(sandbox)
    assert ended.exit_code == code and not ended.running
    assert (await output(sandbox, "echo $x; ps -eo args | grep '^sleep 63'")).startswith("kept\nsleep 631\n")


async def test_an_interrupted_loop_of_the_shell_ends(sandbox: Sandbox) -> None:
    running = asyncio.create_task(bash(sandbox, "echo begun; while :; do :; done"))
    await wait_for(sandbox, "begun")
    await sandbox.call("bash_interrupt", {}, TIMEOUT_S)
    assert (await running).exit_code == 130
    assert await output(sandbox, "echo ok") == "ok\n"
    refused = await sandbox.call("bash_interrupt", {}, TIMEOUT_S)
    assert refused.exit_code == 2 and "nothing is running" in refused.output
    assert (await sandbox.call("bash_interrupt", {"signal": "NOPE"}, TIMEOUT_S)).exit_code == 2


async def test_a_command_that_is_stopped_while_the_shell_reads_it_is_not_run_in_pieces(sandbox: Sandbox) -> None:
    lines = "\n".join("touch it-ran 'it''s'" for _ in range(10_000))
    text = f"cat > f <<'END'\n{lines}\nEND\necho end"
    for number in range(8):
        late = await bash(sandbox, text, 0.004 * number)
        assert late.timed_out or late.output == "end\n", late
        running = asyncio.create_task(bash(sandbox, text))
        await asyncio.sleep(0.004 * number)
        await sandbox.call("bash_interrupt", {}, TIMEOUT_S)
        assert (await running).output in ("", "end\n")
        assert await output(sandbox, "ls | grep -c it; true") == "0\n"


async def test_a_kept_command_can_end_its_shell(sandbox: Sandbox) -> None:
    await bash(sandbox, "echo begun; sleep 0.2; echo more; exit 5", 0.05, keep=True)
    ended = await look(sandbox)
    assert ended.exit_code == 5 and "more\n" in ended.output and "started again" in ended.output
    assert await output(sandbox, "echo ok") == "ok\n"


# --- where there is no bash --------------------------------------------------------------------------


async def test_sh_serves_where_there_is_no_bash(runtime_dir: Path) -> None:
    async for sandbox in made(runtime_dir, SMALL, {"PATH": "/nonexistent"}):
        assert (await bash(sandbox, "echo $0; PATH=/usr/bin:/bin; cd /; x=5; false")).exit_code == 1
        assert await output(sandbox, "echo $? $x $PWD '" + "a" * 3000 + "'") == "1 5 / " + "a" * 3000 + "\n"
        assert (await bash(sandbox, "if")).exit_code == 2
        result = await bash(sandbox, "echo 'é\tb'; exit 4")
        assert result.output.startswith("é\tb\n") and result.exit_code == 4
        for command in ("while :; do :; done", "/bin/sleep 600"):
            assert (await bash(sandbox, command, 0.2)).exit_code is None
            assert await output(sandbox, "echo ok") == "ok\n"


async def test_a_shell_killed_from_outside_is_replaced(sandbox: Sandbox) -> None:
    pid = int(await output(sandbox, "echo $$"))
    os.kill(pid, signal.SIGKILL)
    assert "started again" in (await bash(sandbox, "echo here")).output or await output(sandbox, "echo here")
