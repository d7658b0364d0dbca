"""``sandbox.shell=tmux``: what it shares with our own shell, by the same tests, and what a screen makes of the rest."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import test_bash_tool
import test_runtime_contract
from sandbox_runtimes import SMALL, prepared
from test_bash_tool import TIMEOUT_S, bash, look, output, type_in, wait_for

from prorl_hpc.cli.preflight_shell import shell_problems
from prorl_hpc.config.schema import ProrlConfig, SandboxConfig
from prorl_hpc.config.validation import validate
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec

TMUX = dataclasses.replace(SMALL, shell="tmux", tmux_poll_s=0.01)
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux on this machine")


@pytest.fixture
async def sandbox(runtime_dir: Path) -> AsyncIterator[Sandbox]:
    if shutil.which("tmux") is None:
        pytest.skip("there is no tmux on this machine")
    async for sandbox in test_bash_tool.made(runtime_dir, TMUX):
        assert (await bash(sandbox, "true")).exit_code == 0  # it starts with the first command
        yield sandbox


# --- as our own shell ----------------------------------------------------------------------------------

test_the_shell_persists = test_runtime_contract.test_the_shell_persists
test_exit_codes_come_back = test_runtime_contract.test_exit_codes_come_back
test_commands_arrive_whole = test_runtime_contract.test_commands_arrive_whole
test_a_syntax_error_is_a_result = test_runtime_contract.test_a_syntax_error_is_a_result
test_the_directory_is_in_the_answer = test_bash_tool.test_the_directory_is_in_the_answer
test_output_is_in_order_with_errors = test_bash_tool.test_output_is_in_order_with_errors
test_what_a_command_does_to_its_terminal = test_bash_tool.test_what_a_command_does_to_its_terminal_ends_with_it
test_errors_that_throw_it_back = test_bash_tool.test_errors_that_throw_the_shell_back_to_its_prompt_are_results
test_a_failing_set_e = test_bash_tool.test_a_failing_set_e_ends_the_shell_and_says_so
test_shells_are_separate = test_bash_tool.test_shells_are_separate_and_side_by_side
test_a_timeout_touches_no_other_shell = test_bash_tool.test_a_timeout_touches_no_other_shell
test_commands_take_turns = test_bash_tool.test_commands_of_one_shell_take_turns_within_their_time
test_a_closed_shell_is_gone = test_bash_tool.test_a_closed_shell_is_gone_with_all_it_started
test_a_command_that_ended_unseen = test_bash_tool.test_a_command_that_ended_unseen_does_not_hold_the_shell
test_a_call_in_flight = test_bash_tool.test_a_call_in_flight_can_be_looked_at_and_still_gets_all
test_an_interrupted_loop_ends = test_bash_tool.test_an_interrupted_loop_of_the_shell_ends
test_a_shell_killed_from_outside = test_bash_tool.test_a_shell_killed_from_outside_is_replaced


async def test_a_command_is_kept_and_typed_into(sandbox: Sandbox) -> None:
    command = "read -p 'name? ' name; echo hello $name; cat; cd /; (exit 3)"
    kept = await bash(sandbox, command, 0.2, interactive=True, keep=True)
    assert kept.running and not kept.timed_out
    assert "bash_look" in (await bash(sandbox, "echo too early")).output
    assert (await type_in(sandbox, "worl")).running
    await type_in(sandbox, "dé\n")
    assert "hello worldé\n" in kept.output + await wait_for(sandbox, "hello")
    await type_in(sandbox, "\x04")
    ended = await look(sandbox)
    assert (ended.exit_code, ended.running, ended.cwd) == (3, False, "/")
    assert await output(sandbox, "echo $name; cat") == "worldé\n"


async def test_what_a_timed_out_command_left_is_gone_and_the_shell_stays(sandbox: Sandbox) -> None:
    await bash(sandbox, "x=kept; sleep 641 &")
    late = await bash(sandbox, "echo begun; (setsid sleep 642 &); sleep 643", 0.5)
    assert late.timed_out and late.exit_code is None and late.output.startswith("begun\n[timed out")
    assert await output(sandbox, "echo $x; ps -eo args | grep -o '^sleep 64[1-3]'") == "kept\nsleep 641\n"


async def test_a_cancelled_call_frees_the_shell(sandbox: Sandbox) -> None:
    running = asyncio.create_task(bash(sandbox, "sleep 651"))
    await asyncio.sleep(0.3)
    running.cancel()
    assert await output(sandbox, "echo free; ps -eo args | grep -c '^sleep 651'; true") == "free\n0\n"


# --- as a screen has it --------------------------------------------------------------------------------


async def test_of_long_output_the_last_lines_are_left_and_it_is_said(sandbox: Sandbox) -> None:
    text = await output(sandbox, "seq 30000")
    assert "[tmux keeps 10000 lines" in text and text.endswith("\n29999\n30000\n")
    assert await output(sandbox, "printf 'a\\tb'; printf '%0300d' 0") == "a       b" + "0" * 300


async def test_it_is_looked_at_no_more_often_than_asked_for(runtime_dir: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("there is no tmux on this machine")
    async for sandbox in test_bash_tool.made(runtime_dir, dataclasses.replace(TMUX, tmux_poll_s=1.5)):
        result = await bash(sandbox, "sleep 0.3; echo done")
        assert result.output == "done\n" and result.seconds >= 1.5


@pytest.mark.apptainer
@needs_tmux
async def test_it_works_in_a_container_and_stops_with_it(runtime_dir: Path) -> None:
    runtime = await prepared("apptainer", runtime_dir, TMUX)
    try:
        sandbox = await runtime.start(SandboxSpec("a"))
        assert await output(sandbox, "cd /tmp; sleep 660 & echo é; pwd") == "é\n/tmp\n"
    finally:
        await runtime.close()


# --- where there is none -------------------------------------------------------------------------------


async def test_a_sandbox_without_tmux_says_what_to_do(runtime_dir: Path) -> None:
    runtime = await prepared("local", runtime_dir, SMALL)
    runtime._config = TMUX
    try:
        with pytest.raises(SandboxError, match=r"needs tmux.*sandbox\.shell=own"):
            sandbox = await runtime.start(SandboxSpec("a", env={"PATH": "/nonexistent"}))
            await sandbox.call("bash", {"command": "true"}, TIMEOUT_S)
    finally:
        await runtime.close()


def test_a_machine_without_tmux_is_told_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ProrlConfig(sandbox=SandboxConfig(kind="local", shell="tmux"))
    monkeypatch.setattr("prorl_hpc.cli.preflight_shell.SHELL_PATH", "/nonexistent")
    (problem,) = shell_problems(config)
    assert "no tmux" in problem and "sandbox.shell=own" in problem
    config.sandbox.shell = "own"
    assert list(shell_problems(config)) == []


def test_an_image_without_tmux_is_told_before_the_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ProrlConfig(sandbox=SandboxConfig(kind="apptainer", shell="tmux", image="some.sif"))
    binary = tmp_path / "apptainer"
    monkeypatch.setattr("prorl_hpc.cli.preflight_shell.find_binary", lambda: str(binary))
    monkeypatch.setattr("prorl_hpc.cli.preflight_shell.resolve", Path)
    for said, problems in (("none", 1), ("/usr/bin/tmux", 0)):
        binary.write_text(f"#!/bin/sh\necho {said}\n")
        binary.chmod(0o755)
        found = list(shell_problems(config))
        assert len(found) == problems and all("some.sif has no tmux" in problem for problem in found)


def test_other_shells_and_intervals_are_refused() -> None:
    told = validate(ProrlConfig(sandbox=SandboxConfig(shell="tmuks", tmux_poll_s=0)))
    assert any("sandbox.shell=tmuks" in text and "tmux" in text for text in told)
    assert any("sandbox.tmux_poll_s=0" in text for text in told)
