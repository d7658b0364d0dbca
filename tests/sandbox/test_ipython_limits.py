"""Cells that do not end, kernels that die, and several of both."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ipython_sandbox import Cells, cells_of

from prorl_hpc.sandbox.tools.kernel_process import KernelProcess
from prorl_hpc.sandbox.tools.loop import Loop
from prorl_hpc.sandbox.tools.toolset import Host, Settings


@pytest.fixture(params=("inprocess", "kernel"))
async def cells(request: pytest.FixtureRequest, runtime_dir: Path) -> AsyncIterator[Cells]:
    async with cells_of(request.param, runtime_dir) as cells:
        yield cells


async def test_a_cell_is_interrupted_at_its_time_limit(cells: Cells) -> None:
    await cells.say("import subprocess, time\nx = 1\nearlier = subprocess.Popen(['sleep', '600'])\ntime.sleep(0.05)")
    late = await cells.run("x = 2\nprint('half')\ntime.sleep(600)", timeout_s=0.3)
    assert late.timed_out and late.exit_code is None
    assert late.output.startswith("half\n") and "KeyboardInterrupt" in late.output
    assert late.output.endswith("[timed out after 0.3 s: the cell was interrupted, its variables are kept]\n")
    assert await cells.say("x") == "2\n"
    await cells.run("child = subprocess.Popen(['sleep', '600'])\nchild.wait()", timeout_s=0.3)
    # An interrupt between the child's end and Python's notice of it loses the exit code, so that is not looked at.
    assert await cells.say("child.wait(5) is not None, earlier.poll() is None") == "(True, True)\n"
    assert (await cells.run("!sleep 600", timeout_s=0.3)).timed_out
    assert await cells.say("x") == "2\n"


async def test_a_cell_that_does_not_react_costs_the_kernel(cells: Cells) -> None:
    await cells.say("x = 1")
    stubborn = "import time\nwhile True:\n    try:\n        time.sleep(600)\n    except BaseException:\n        pass"
    late = await cells.run(stubborn, timeout_s=0.3)
    assert late.timed_out and late.exit_code is None
    assert "did not react to the interrupt" in late.output
    assert "was started again: its variables are lost" in late.output
    assert "NameError" in (await cells.run("x")).output


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; print('last'); os._exit(3)", "with exit code 3"),
        ("import ctypes; print('last'); ctypes.string_at(0)", "by SIGSEGV"),
        ("import os; print('last'); os.kill(os.getpid(), 9)", "by SIGKILL"),
        ("import os; print('last'); os.close(3)", "by SIGKILL"),
    ],
)
async def test_a_kernel_that_ends_is_started_again(cells: Cells, code: str, how: str) -> None:
    await cells.say("x = 1")
    ended = await cells.run(code)
    assert ended.exit_code == 1 and not ended.timed_out
    assert ended.output.startswith("last\n")
    assert ended.output.endswith(f"[the kernel ended {how} and was started again: its variables are lost]\n")
    after = await cells.run("'x' in globals()")
    assert after.output == "False\n"


async def test_an_end_between_two_cells_is_told_with_the_next(cells: Cells) -> None:
    await cells.say(
        "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), os._exit(5))).start()"
    )
    await asyncio.sleep(0.5)
    after = await cells.say("1")
    assert after == "[the kernel ended with exit code 5 and was started again: its variables are lost]\n1\n"


async def test_interrupts_reach_the_running_cell_only(cells: Cells) -> None:
    await cells.say("import time")
    assert (await cells.interrupt()).output == "[no cell runs in kernel main]\n"
    running = asyncio.create_task(cells.run("print('on')\ntime.sleep(600)"))
    await asyncio.sleep(0.2)
    await cells.interrupt()
    result = await running
    assert (result.exit_code, result.timed_out) == (1, False)
    assert "KeyboardInterrupt" in result.output and "[interrupted" in result.output
    assert await cells.say("print('ok')") == "ok\n"


async def test_restart_makes_a_new_interpreter(cells: Cells) -> None:
    await cells.say("import time\nx = 1")
    assert "started again" in (await cells.restart()).output
    assert "NameError" in (await cells.run("x")).output
    running = asyncio.create_task(cells.run("import time\ntime.sleep(600)"))
    await asyncio.sleep(0.2)
    assert (await cells.restart()).exit_code == 0
    assert "was ended by ipython_restart" in (await running).output
    assert await cells.say("1") == "1\n"


async def test_a_restart_of_a_kernel_that_is_starting_is_a_restart(cells: Cells) -> None:
    for _ in range(3):
        early = asyncio.create_task(cells.run("print('early')"))
        await asyncio.sleep(0.02)
        restarted = await cells.restart()
        assert restarted.exit_code == 0, restarted
        assert (await early).output.endswith("early\n")
        assert (await cells.run("import os; os._exit(0)")).exit_code == 1
    late = await cells.run("1", timeout_s=0.01)
    assert late.timed_out and "still starting" in late.output
    assert "started again" in (await cells.restart()).output
    assert await cells.say("1") == "1\n"


async def test_cells_of_one_kernel_take_turns(cells: Cells) -> None:
    await cells.say("import time\nseen = []")
    await asyncio.gather(*(cells.run(f"time.sleep(0.05)\nseen.append({n})") for n in range(3)))
    assert await cells.say("seen") == "[0, 1, 2]\n"
    running = asyncio.create_task(cells.run("time.sleep(1)\nseen.append(3)"))
    await asyncio.sleep(0.1)
    waiting = await cells.run("seen.append(4)", timeout_s=0.2)
    assert waiting.timed_out and "was not begun" in waiting.output
    await running
    assert await cells.say("seen") == "[0, 1, 2, 3]\n"


async def test_a_cancelled_cell_is_interrupted(cells: Cells) -> None:
    await cells.say("import time\nx = 1")
    running = asyncio.create_task(cells.run("x = 2\ntime.sleep(600)\nx = 3"))
    await asyncio.sleep(0.2)
    running.cancel()
    assert await cells.say("x") == "2\n"


async def test_kernels_are_apart_and_limited(runtime_dir: Path) -> None:
    async with cells_of("inprocess", runtime_dir) as cells:
        await cells.say("x = 1")
        assert "NameError" in (await cells.run("x", kernel="second")).output
        assert (await cells.run("1", kernel="../x")).exit_code == 2
        assert "there is no kernel 'third'; running: main, second" in (await cells.restart("third")).output
        await asyncio.gather(*(cells.run("1", kernel=f"k{n}") for n in range(6)))
        refused = await cells.run("1", kernel="one-more")
        assert refused.exit_code == 2 and "there are 8 kernels already" in refused.output
        assert await cells.say("x") == "1\n"


async def test_what_comes_after_a_cell_is_shown_with_the_next(cells: Cells) -> None:
    await cells.say("import subprocess\n_p = subprocess.Popen('sleep 0.2; echo late', shell=True)")
    await asyncio.sleep(0.5)
    assert await cells.say("1") == "late\n1\n"


async def test_restarts_leave_nothing_open(cells: Cells) -> None:
    count = "ls /proc/$PPID/fd | wc -l; ls -A $(dirname $(dirname $TMPDIR/x))/s | grep -vc ipython"
    await cells.say("1")
    before = await cells.bash(count)
    for _ in range(3):
        await cells.restart()
        await cells.run("import os; os._exit(0)")
    await cells.say("1")
    assert await cells.bash(count) == before


async def test_forged_messages_cost_the_kernel_only(cells: Cells) -> None:
    done = (
        "b'{\"done\": 1e999}\\n'",
        "b'{\"done\": ' + b'9' * 4000 + b'}\\n'",
        "b'{\"done\": []}\\n'",
        "b'[' * 60_000",
    )
    for forged in ("b'5\\n'", "b'{}\\n'", "b'[1]\\n'", "b'{\"file\": 5}\\n'", "b'{'", "b'x' * 100_000", *done):
        await cells.run(
            f"import os, time\nos.write(3, {forged})\ntime.sleep(0.1)\nos.write(3, b'\\n')\ntime.sleep(600)", 5.0
        )
        assert (await cells.say("1")).endswith("1\n"), forged
    await cells.say("import os\n_ = os.write(3, b'{\"ready\": 1}\\n' * 1000)")
    assert await cells.say("1") == "1\n"
    assert await cells.bash("echo alive") == "alive\n"


def test_a_reply_that_overtakes_the_names_of_its_images_waits_for_them(tmp_path: Path) -> None:
    given = {"root": "", "env": {}, "inherit_env": False, "strip_ansi": True, "open_paths": False, "limits": {}}
    more = {"output_limit_bytes": 4096, "ipython_mode": "kernel", "scratch": str(tmp_path)}
    process = KernelProcess(Host(Settings({**given, **more}), Loop(), None, ""), [])  # type: ignore[arg-type]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        process._control = ours.fileno()
        theirs.send(b'{"file": "image.png"}\n')
        process._on_reply({"msg_type": "execute_reply", "content": {"status": "ok"}})
    assert (process.files, process.exit_code) == (["image.png"], 0)


async def test_output_without_end_from_the_background_holds_up_nothing(cells: Cells) -> None:
    await cells.say("import subprocess\nflood = subprocess.Popen(['yes'])")
    assert "y\ny\n" in await cells.say("import time\ntime.sleep(0.1)")
    assert await cells.bash("echo hi") == "hi\n"
    assert "0" in await cells.say("flood.kill(); flood.wait(); 0")
