"""Cells: what they show, what they share, and how they fail. In-process and in a Jupyter kernel alike."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ipython_sandbox import Cells, cells_of
from sandbox_runtimes import KINDS

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import tools

MODES = ("inprocess", "kernel")
PNG = "b'\\x89PNG\\r\\n\\x1a\\n'"


@pytest.fixture(params=MODES)
async def cells(request: pytest.FixtureRequest, runtime_dir: Path) -> AsyncIterator[Cells]:
    async with cells_of(request.param, runtime_dir) as cells:
        yield cells


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
async def test_cells_work_in_every_kind_of_sandbox(kind: str, mode: str, runtime_dir: Path) -> None:
    async with cells_of(mode, runtime_dir, kind) as cells:
        assert await cells.say("import os\nx = 20\nx + 1") == "21\n"
        assert await cells.say("x") == "20\n"
        assert (await cells.say("print(os.getcwd())")).strip() == (await cells.bash("pwd")).strip()
        ended = await cells.run("os._exit(3)")
        assert "the kernel ended with exit code 3 and was started again: its variables are lost" in ended.output
        assert "NameError" in (await cells.run("x")).output


async def test_variables_imports_and_results_persist(cells: Cells) -> None:
    assert await cells.say("import math\ny = math.floor(2.5)\ndef double(n):\n    return 2 * n") == ""
    assert await cells.say("double(y)") == "4\n"
    assert await cells.say("_ + 1") == "5\n"
    assert await cells.say("double(y);") == ""
    assert await cells.say("'a\\nb', {'k': [1]}") == "('a\\nb', {'k': [1]})\n"
    assert await cells.say("None") == ""


async def test_all_that_is_written_comes_in_order(cells: Cells) -> None:
    code = (
        "import ctypes, os, sys\nprint('python')\nos.system('echo child; echo child error >&2')\n"
        "print('error', file=sys.stderr)\n!echo shell\n"
        "ctypes.CDLL(None).printf(b'from C\\n') and None\n'value'"
    )
    lines = (await cells.say(code)).splitlines()
    assert [line for line in lines if line not in ("from C", "'value'")] == [
        "python", "child", "child error", "error", "shell",
    ]  # fmt: skip
    assert {"from C", "'value'"} < set(lines)  # C keeps its own buffer until the cell is over


async def test_an_exception_comes_with_its_traceback_as_plain_text(cells: Cells) -> None:
    failed = await cells.run("def f(n):\n    return 1 / n\nprint('before')\nf(0)")
    assert failed.exit_code == 1 and not failed.timed_out
    assert failed.output.startswith("before\n")
    assert "ZeroDivisionError: division by zero" in failed.output and "----> 2     return 1 / n" in failed.output
    assert "\x1b" not in failed.output
    wrong = await cells.run("x = = 1")
    assert wrong.exit_code == 1 and "SyntaxError" in wrong.output
    assert await cells.say("1") == "1\n"


async def test_top_level_await_works_and_can_be_interrupted(cells: Cells) -> None:
    assert await cells.say("import asyncio\nawait asyncio.sleep(0.01)\n'slept'") == "'slept'\n"
    late = await cells.run("await asyncio.sleep(600)", timeout_s=0.3)
    assert late.timed_out and "its variables are kept" in late.output
    assert await cells.say("1") == "1\n"


async def test_input_gets_a_clear_error(cells: Cells) -> None:
    asked = await cells.run("name = input('who? ')")
    assert asked.exit_code == 1 and "nobody answers input()" in asked.output


async def test_exit_ends_the_cell_only(cells: Cells) -> None:
    await cells.say("kept = 1")
    for code, expected in {
        "exit": 0, "exit()": 0, "quit()": 0, "import sys; sys.exit(0)": 0, "sys.exit()": 0, "exit(3)": 1, "sys.exit('no')": 1,
    }.items():  # fmt: skip
        left = await cells.run(code)
        assert (left.exit_code, left.output.count("exit ends the cell only")) == (expected, 1), (code, left.output)
    assert await cells.say("kept") == "1\n"


async def test_images_become_files_and_overwrite_nothing(cells: Cells) -> None:
    await cells.bash("mkdir .ipython_files; echo mine > .ipython_files/image_1.png")
    await cells.say(
        f"class Picture:\n    def _repr_png_(self):\n        return {PNG}\n"
        "class Drawing:\n    def _repr_svg_(self):\n        return '<svg/>'"
    )
    shown = await cells.run("print('a')\ndisplay(Picture())\nprint('b')\nPicture()")
    assert shown.files == (".ipython_files/image_2.png", ".ipython_files/image_3.png")
    assert shown.output == f"a\n[image: {shown.files[0]}]\nb\n[image: {shown.files[1]}]\n"
    assert await cells.sandbox.download(shown.files[0]) == b"\x89PNG\r\n\x1a\n"
    drawn = await cells.run("Drawing()")
    assert await cells.sandbox.download(drawn.files[0]) == b"<svg/>"
    assert await cells.sandbox.download(".ipython_files/image_1.png") == b"mine\n"
    assert (await cells.run("1")).files == ()


async def test_imports_leave_nothing_in_the_workspace_and_other_programs_do_as_ever(cells: Cells) -> None:
    await cells.bash("echo 'x = 1' > of_mine.py")
    assert await cells.say("import of_mine\nof_mine.x") == "1\n"
    assert await cells.bash("ls") == "of_mine.py\n"
    await cells.say("!python3 -c 'import of_mine'")
    assert (await cells.bash("ls")).split() == ["__pycache__", "of_mine.py"]


async def test_figures_of_matplotlib_are_shown(cells: Cells) -> None:
    pytest.importorskip("matplotlib")
    shown = await cells.run("import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()\nprint('done')")
    assert shown.output == f"[image: {shown.files[0]}]\ndone\n"
    assert (await cells.sandbox.download(shown.files[0])).startswith(b"\x89PNG")
    assert len((await cells.run("_ = plt.plot([2, 1])")).files) == 1


async def test_long_output_keeps_head_and_tail(cells: Cells) -> None:
    output = await cells.say("for n in range(200_000): print(n)")
    assert output.startswith("0\n1\n") and output.endswith("199998\n199999\n")
    assert "bytes of output left out here" in output and len(output) < 5000


async def test_cells_of_any_size_and_shape_arrive(cells: Cells) -> None:
    assert await cells.say("len('" + "é" * 300_000 + "')") == "300000\n"
    assert await cells.say("") == "" and await cells.say("# nothing") == "" and await cells.say("\n\n  7\n\n") == "7\n"
    assert await cells.say("print('\\ud800 \\x00|')") == "\\ud800 |\n"
    assert await cells.say('%%bash\necho "it\'s"') == "it's\n"
    assert "Signature: len" in await cells.say("len?")


async def test_a_fork_in_a_cell_ends_with_the_cell(cells: Cells) -> None:
    await cells.say("import os\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1])")
    assert await cells.say("pid > 0") == "True\n"


async def test_modules_of_the_workspace_can_be_imported_but_hide_none_of_ours(cells: Cells) -> None:
    await cells.bash("echo 'raise SystemExit(9)' | tee json.py random.py traitlets.py; echo 'n = 4' > mine.py")
    assert await cells.say("import mine\nmine.n") == "4\n"


async def test_other_tools_answer_while_a_cell_runs(cells: Cells) -> None:
    await cells.say("import time")
    running = asyncio.create_task(cells.run("time.sleep(0.5)\nprint('end')"))
    await asyncio.sleep(0.1)
    assert await cells.bash("echo hi") == "hi\n" and not running.done()
    assert (await running).output == "end\n"


async def test_the_pythons_of_the_image_come_first(runtime_dir: Path, tmp_path: Path) -> None:
    """One with IPython is taken; one that has none, or does not work at all, is passed over."""
    theirs = tmp_path / "python3"
    for script, isolated in ((f'exec {sys.executable} "$@"', "0"), ("exit 1", "1"), ("kill -9 $$", "1")):
        theirs.write_text(f"#!/bin/sh\n{script}\n")
        theirs.chmod(0o755)
        async with cells_of("inprocess", runtime_dir, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}) as cells:
            assert await cells.say("import sys\nsys.flags.isolated") == f"{isolated}\n"


async def test_a_sandbox_without_ipython_fails_as_a_sandbox(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = "/usr/bin/python3"
    if subprocess.run([bare, "-c", "import IPython"], capture_output=True, check=False).returncode != 1:
        pytest.skip(f"{bare} has IPython")
    monkeypatch.setattr(sys, "executable", bare)
    async with cells_of("inprocess", runtime_dir) as cells:
        with pytest.raises(SandboxError, match=r"(?s)the kernel could not be started, .*No module named 'IPython'"):
            await cells.run("1")


def test_the_program_of_the_cells_is_for_any_python() -> None:
    source = (Path(tools.__file__).parent / "cell_runner.py").read_text()
    tree = ast.parse(source, feature_version=(3, 7))
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(module.startswith("prorl_hpc") for module in modules)
