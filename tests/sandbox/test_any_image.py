"""Every tool works in every image, whatever that has: the tool server brings what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from odd_images import broken_libc_image, busybox_image, empty_image, image_whose_bash_ends_at_once, image_with_a_user
from sandbox_runtimes import prepared

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec

pytestmark = pytest.mark.apptainer
TIMEOUT_S = 30.0

Make = Callable[[Path], Path]


@pytest.fixture
async def sandbox_of(runtime_dir: Path, tmp_path: Path):
    runtimes = []

    async def start(make: Make) -> Sandbox:
        try:
            find_binary()
        except SandboxError as error:
            pytest.skip(f"apptainer does not work on this machine: {error}")
        config = SandboxConfig(kind="apptainer", image=str(make(tmp_path / "image")), start_retries=0)
        runtimes.append(await prepared("apptainer", runtime_dir, config))
        return await runtimes[-1].start(SandboxSpec("a"))

    yield start
    for runtime in runtimes:
        await runtime.close()


async def output(sandbox: Sandbox, tool: str, **arguments: object) -> str:
    result = await sandbox.call(tool, arguments, TIMEOUT_S)
    assert result.exit_code == 0, result
    return result.output


@pytest.mark.parametrize(
    "make", [empty_image, busybox_image, broken_libc_image, image_with_a_user, image_whose_bash_ends_at_once]
)
async def test_all_tools_work(sandbox_of: Callable[[Make], object], make: Make) -> None:
    sandbox = await sandbox_of(make)  # type: ignore[misc]
    assert (
        await output(sandbox, "bash", command="x=(1 2 3); cd /tmp; echo ${#x[@]} $PWD ${BASH_VERSION%%.*}")
        == "3 /tmp 5\n"
    )
    await sandbox.upload("d/f.txt", b"one\ntwo\n")
    await output(sandbox, "edit", command="str_replace", path="d/f.txt", old="two", new="2")
    assert await sandbox.download("d/f.txt") == b"one\n2\n"
    assert "d/f.txt" in await output(sandbox, "search", pattern="^one")
    assert "42\n" in await output(sandbox, "ipython", code="import ssl, sqlite3, ctypes\nprint(6 * 7)")
    assert (await sandbox.stats()).processes >= 2


async def test_programs_of_the_image_run(sandbox_of: Callable[[Make], object]) -> None:
    sandbox = await sandbox_of(busybox_image)  # type: ignore[misc]
    await sandbox.upload("f", b"content\n")
    result = await sandbox.exec(["cat", "f"], TIMEOUT_S)
    assert (result.output, result.exit_code) == ("content\n", 0)
    assert await output(sandbox, "bash", command="cat f | sh -c 'cat; echo $0'") == "content\nsh\n"
    assert (await sandbox.exec(["python3"], TIMEOUT_S)).exit_code == 127


async def test_the_environment_of_the_image_is_there_and_its_user_is_not_needed(
    sandbox_of: Callable[[Make], object],
) -> None:
    sandbox = await sandbox_of(image_with_a_user)  # type: ignore[misc]
    assert (
        await output(sandbox, "bash", command="echo $FROM_IMAGE $HOME; pwd; > mine; ls")
        == "yes /tmp\n/workspace\nmine\n"
    )


async def test_a_program_of_a_broken_image_fails_alone(sandbox_of: Callable[[Make], object]) -> None:
    sandbox = await sandbox_of(broken_libc_image)  # type: ignore[misc]
    assert (await sandbox.call("bash", {"command": "python3 -c 1"}, TIMEOUT_S)).exit_code in (126, 127)
    assert await output(sandbox, "bash", command="echo still here") == "still here\n"


async def test_python_starts_itself_without_a_libc(sandbox_of: Callable[[Make], object]) -> None:
    """Of the cells, that is: subprocess and multiprocessing, and what they start in turn."""
    sandbox = await sandbox_of(busybox_image)  # type: ignore[misc]
    again = (
        "import subprocess, sys; print(sys.executable, flush=True); subprocess.run([sys.executable, '-c', 'print(42)'])"
    )
    code = f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {again!r}], capture_output=True, text=True).stdout)"
    assert "/.prorl/kit/python3\n42\n" in await output(sandbox, "ipython", code=code)
    code = "import multiprocessing as m, os\np = m.get_context('spawn').Process(target=os.mkdir, args=('made',))\np.start()\np.join()\nprint(p.exitcode, os.listdir())"
    assert "0 ['made']" in await output(sandbox, "ipython", code=code)
