"""The same promises for every runtime that starts processes, and those that a fake can keep for the fake too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from sandbox_runtimes import KINDS, prepared

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.fake import FakeRuntime
from prorl_hpc.sandbox.leftovers import marked_processes, sweep
from prorl_hpc.sandbox.protocol import Runtime, Sandbox, SandboxSpec, ToolResult

TIMEOUT_S = 30.0


async def bash(sandbox: Sandbox, command: str, timeout_s: float = TIMEOUT_S) -> ToolResult:
    return await sandbox.call("bash", {"command": command}, timeout_s)


async def output(sandbox: Sandbox, command: str) -> str:
    result = await bash(sandbox, command)
    assert result.exit_code == 0, result
    return result.output


@pytest.fixture
async def sandbox(runtime: AttachedRuntime) -> Sandbox:
    return await runtime.start(SandboxSpec("worker-0-1"))


# --- promises that the fake keeps as well ---------------------------------------------------------


@pytest.fixture(params=["fake", *KINDS])
async def any_runtime(request: pytest.FixtureRequest, runtime_dir: Path):
    runtime: Runtime = FakeRuntime() if request.param == "fake" else await prepared(request.param, runtime_dir)
    yield runtime
    await runtime.close()


async def test_keeps_the_protocol(any_runtime: Runtime) -> None:
    assert isinstance(any_runtime, Runtime) and any_runtime.description
    sandbox = await any_runtime.start(SandboxSpec("a"))
    assert isinstance(sandbox, Sandbox) and sandbox.sandbox_id == "a"
    await sandbox.upload("f.txt", b"hello\n")
    result = await bash(sandbox, "cat f.txt")
    assert (result.output, result.exit_code, result.timed_out) == ("hello\n", 0, False)


async def test_files_come_back_as_they_went(any_runtime: Runtime) -> None:
    sandbox = await any_runtime.start(SandboxSpec("a"))
    large = os.urandom(1_300_000)
    for path, content in {"a/b/c.bin": large, "empty": b"", "/workspace/absolute": b"\0\xff"}.items():
        await sandbox.upload(path, content)
        assert await sandbox.download(path) == content
    await sandbox.upload("a/b/c.bin", b"short")
    assert await sandbox.download("/workspace/a/b/c.bin") == b"short"
    assert await sandbox.download("absolute") == b"\0\xff"


async def test_paths_stay_in_the_workspace(any_runtime: Runtime) -> None:
    sandbox = await any_runtime.start(SandboxSpec("a"))
    for path in ("../out", "/etc/passwd", "a/../../out", "/workspace/../out", "/workspace", ".", ""):
        with pytest.raises(SandboxError, match="leaves the workspace"):
            await sandbox.upload(path, b"x")
        with pytest.raises(SandboxError, match="leaves the workspace"):
            await sandbox.download(path)


async def test_a_missing_file_is_an_error(any_runtime: Runtime) -> None:
    sandbox = await any_runtime.start(SandboxSpec("a"))
    with pytest.raises(SandboxError, match="No such file"):
        await sandbox.download("nothing")


async def test_wrong_calls_are_results(any_runtime: Runtime) -> None:
    sandbox = await any_runtime.start(SandboxSpec("a"))
    for tool, arguments in (("nope", {}), ("bash", {}), ("bash", {"command": 1}), ("bash", {"cmd": "ls"})):
        result = await sandbox.call(tool, arguments, TIMEOUT_S)
        assert result.exit_code == 2 and "bash" in result.output, result


async def test_stop_is_idempotent_and_final(any_runtime: Runtime) -> None:
    sandbox = await any_runtime.start(SandboxSpec("a"))
    await asyncio.gather(sandbox.stop(), sandbox.stop())
    await sandbox.stop()
    with pytest.raises(SandboxError, match="stopped"):
        await bash(sandbox, "true")
    again = await any_runtime.start(SandboxSpec("a"))
    with pytest.raises(SandboxError):
        await again.download("f.txt")


async def test_what_cannot_be_started_is_refused(any_runtime: Runtime) -> None:
    for spec in (
        SandboxSpec("../x"),
        SandboxSpec(""),
        SandboxSpec("a", network="lan"),
        SandboxSpec("a", env={"A=B": ""}),
    ):
        with pytest.raises(SandboxError):
            await any_runtime.start(spec)
    await any_runtime.start(SandboxSpec("twice"))
    with pytest.raises(SandboxError, match="already"):
        await any_runtime.start(SandboxSpec("twice"))


# --- the shell ------------------------------------------------------------------------------------


async def test_the_shell_persists(sandbox: Sandbox) -> None:
    await bash(sandbox, "mkdir -p d; cd d; x='a b'; export Y=1; f() { echo f:$1; }; shopt -s nullglob")
    assert await output(sandbox, "echo $x $Y; f 2; basename $PWD; echo *.none") == "a b 1\nf:2\nd\n\n"


async def test_exit_codes_come_back(sandbox: Sandbox) -> None:
    for command, code in (
        ("true", 0),
        ("false", 1),
        ("(exit 7)", 7),
        ("nonsense_xyz", 127),
        ("kill -9 $BASHPID & wait $!", 137),
    ):
        assert (await bash(sandbox, command)).exit_code == code, command
    await bash(sandbox, "(exit 9)")
    assert await output(sandbox, "echo $?; echo $?") == "9\n0\n"


async def test_commands_arrive_whole(sandbox: Sandbox) -> None:
    text = "'\"$`\\!\t" * 10 + "é€" + "x" * 100_000
    await sandbox.upload("expected", text.encode())
    quoted = "'" + text.replace("'", "'\\''") + "'"
    assert (
        await output(sandbox, f"printf %s {quoted} > got; cmp got expected && wc -c < got") == f"{len(text.encode())}\n"
    )
    script = "for i in 1 2; do\n  echo $i\ndone\ncat <<'END'\n$x !! it's\nEND\n\n# a comment"
    assert await output(sandbox, script) == "1\n2\n$x !! it's\n"


async def test_a_syntax_error_is_a_result(sandbox: Sandbox) -> None:
    for command in ("if", "echo 'open", ")", "cat <<END\nno end"):
        result = await bash(sandbox, command)
        assert not result.timed_out, result
    assert await output(sandbox, "echo ok") == "ok\n"


async def test_output_is_plain(sandbox: Sandbox) -> None:
    assert await output(sandbox, "printf 'a\\n'; printf b >&2; echo c") == "a\nbc\n"
    assert await output(sandbox, "printf '\\033[1;31mred\\033[0m \\033]0;title\\007end\\n'") == "red end\n"
    assert await output(sandbox, "PS1='$ '; echo x") == "x\n"
    assert await output(sandbox, "echo y; stty echo </dev/tty 2>/dev/null; true") == "y\n"
    assert "\ufffd" in await output(sandbox, "printf '\\377\\376'")


async def test_stdin_is_empty(sandbox: Sandbox) -> None:
    assert await output(sandbox, "cat; read x; echo end") == "end\n"


async def test_output_is_cut_with_a_mark(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "echo first; head -c 30000000 /dev/zero | tr '\\0' z; echo; echo last")
    assert result.exit_code == 0
    assert result.output.startswith("first\n") and result.output.endswith("last\n")
    assert "bytes of output left out" in result.output
    assert len(result.output) < 4096 + 100


async def test_a_leaving_shell_is_replaced(sandbox: Sandbox) -> None:
    for command, code in (("echo before; exit 3", 3), ("exec echo before", 0), ("echo before; kill -9 $$", 137)):
        result = await bash(sandbox, command)
        assert result.exit_code == code and "before" in result.output and "started again" in result.output, result
        assert (await output(sandbox, "pwd | grep -c work")) == "1\n"


async def test_a_shell_that_dies_between_calls_is_replaced(sandbox: Sandbox) -> None:
    await bash(sandbox, "(sleep 0.1; kill -9 $$) & disown")
    await asyncio.sleep(0.5)
    result = await bash(sandbox, "echo here")
    assert result.output.endswith("here\n") and "started again" in result.output


async def test_background_output_stays_out_of_the_next_call(sandbox: Sandbox) -> None:
    await bash(sandbox, "for i in 1 2 3; do (while :; do echo NOISE; sleep 0.01; done) & done; (sleep 0.05) &")
    for _ in range(5):
        assert await output(sandbox, "sleep 0.1; echo clean") == "clean\n"


@pytest.mark.parametrize(
    "command",
    [
        "echo shown; sleep 600",
        "echo shown; while :; do :; done",
        "echo shown; for i in 1 2 3 4 5 6 7 8; do sleep 600; done",
        "echo shown; (sleep 601 & setsid sleep 602 & (setsid sh -c 'sleep 603; sleep 604' &) ; sleep 605) | cat",
        "echo shown; trap '' INT TERM; python3 -c 'import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(606)'",
        "echo shown; nohup sleep 607 & cat /dev/zero | tr '\\0' '\\0' > /dev/null",
    ],
)
async def test_a_timed_out_command_dies_with_all_it_started(sandbox: Sandbox, command: str) -> None:
    await bash(sandbox, "sleep 500 & echo $! > kept; x=kept; cd /")
    result = await bash(sandbox, command, timeout_s=1.0)
    assert result.timed_out and result.exit_code is None
    assert result.output.startswith("shown\n") or "\nshown\n" in result.output
    assert "timed out" in result.output
    assert await output(sandbox, "pgrep -f '^sleep 60[0-9]' -s 0; pgrep -fc '^sleep 60[0-7]$'; true") == "0\n"
    # What an earlier command left in the background, and the shell itself, are not touched.
    assert await output(sandbox, "echo $x $PWD") == "kept /\n"
    kept = (await sandbox.download("kept")).decode().strip()
    assert await output(sandbox, f"kill -0 {kept} && echo alive") == "alive\n"


async def test_a_shell_that_cannot_be_interrupted_is_replaced(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "trap '' INT; while :; do :; done", timeout_s=0.3)
    assert result.timed_out and "started again" in result.output
    assert await output(sandbox, "echo ok") == "ok\n"


async def test_many_timeouts_in_a_row_keep_the_shell_in_step(sandbox: Sandbox) -> None:
    await bash(sandbox, "x=still")
    for number in range(20):
        assert (await bash(sandbox, "while :; do :; done" if number % 2 else "sleep 600", timeout_s=0.02)).timed_out
        assert await output(sandbox, f"echo {number} $x") == f"{number} still\n"


async def test_a_cancelled_call_frees_the_sandbox(sandbox: Sandbox) -> None:
    task = asyncio.create_task(bash(sandbox, "sleep 600", timeout_s=700))
    await asyncio.sleep(0.3)
    queued = asyncio.create_task(bash(sandbox, "touch never", timeout_s=700))
    await asyncio.sleep(0.05)
    queued.cancel()
    task.cancel()
    await asyncio.gather(task, queued, return_exceptions=True)
    assert await output(sandbox, "pgrep -fc '^sleep 600$'; ls") == "0\n"


async def test_files_that_would_block_or_escape_are_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    await bash(sandbox, "mkfifo fifo; mkdir dir; ln -s /etc/passwd link; ln -s /etc out; ln -s dir inner")
    for path in ("fifo", "dir", "link", "out/passwd"):
        with pytest.raises(SandboxError):
            await sandbox.download(path)
        with pytest.raises(SandboxError):
            await sandbox.upload(path, b"x")
    await sandbox.upload("inner/file", b"fine")
    assert await output(sandbox, "cat dir/file") == "fine"


# --- isolation and limits -------------------------------------------------------------------------


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("SLURM_JOB_ID", "SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "APPTAINERENV_X", "PYTHONPATH"):
        monkeypatch.setenv(name, "leaked-9c1f")
    return "leaked-9c1f"


@pytest.mark.parametrize("kind", KINDS)
async def test_the_environment_is_scrubbed(kind: str, runtime_dir: Path, secret: str) -> None:
    runtime = await prepared(kind, runtime_dir)
    sandbox = await runtime.start(SandboxSpec("a", env={"ASKED": "for this"}))
    server = "1" if kind == "apptainer" else "$PPID"
    seen = await output(
        sandbox, f"env; tr '\\0' '\\n' < /proc/{server}/environ; tr '\\0' '\\n' < /proc/{server}/cmdline"
    )
    assert secret not in seen and "ASKED=for this" in seen
    for word in ("SLURM", "SSH", "AWS", "TOKEN", "APPTAINERENV"):
        assert word not in seen
    await runtime.close()


async def test_a_file_cannot_grow_beyond_the_limit(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "head -c 20000000 /dev/zero > big; echo code $?; wc -c < big")
    assert result.output.splitlines()[-1] == str(8 << 20)
    assert "code 0" not in result.output


async def test_sandboxes_do_not_share_a_workspace(runtime: AttachedRuntime) -> None:
    one, other = await asyncio.gather(runtime.start(SandboxSpec("one")), runtime.start(SandboxSpec("other")))
    await one.upload("mine", b"1")
    assert await output(other, "ls") == ""
    await one.stop()
    assert await output(other, "echo still here") == "still here\n"


@pytest.mark.apptainer
async def test_containers_see_neither_each_other_nor_the_host(runtime_dir: Path) -> None:
    runtime = await prepared("apptainer", runtime_dir)
    one, other = [await runtime.start(SandboxSpec(name)) for name in ("one", "other")]
    (runtime_dir / "probe").touch()
    await bash(one, "touch /tmp/mine /dev/shm/mine; sleep 700 & ")
    seen = await output(other, "ls -A / /tmp /dev/shm /home /root /etc; ps -e -o args")
    assert "mine" not in seen and "sleep 700" not in seen
    assert (
        await output(other, f"ls -d {runtime_dir} {Path.cwd()} 2>/dev/null; ls -1A /.prorl")
        == "code\nhosts\nkit\nover\ns\nsockets\n"
    )
    for place in ("/usr", "/etc", "/.prorl", "/.prorl/kit/bin", "/.prorl/code/prorl_hpc/sandbox/tools"):
        assert (await bash(other, f"touch {place}/x")).exit_code == 1, place
    assert (await bash(other, "echo >> /.prorl/code/prorl_hpc/sandbox/tools/start.py")).exit_code == 1
    (runtime_dir / "probe").unlink()
    await runtime.close()


@pytest.mark.apptainer
async def test_no_network_unless_asked(runtime_dir: Path) -> None:
    runtime = await prepared("apptainer", runtime_dir)
    listening = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connect = f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 5)'"
    closed = await runtime.start(SandboxSpec("closed"))
    assert (await bash(closed, connect)).exit_code == 1
    assert await output(closed, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n"
    opened = await runtime.start(SandboxSpec("opened", network="host"))
    assert (await bash(opened, connect)).exit_code == 0
    listening.close()
    await runtime.close()


# --- endings --------------------------------------------------------------------------------------


def belongings(others: set[int]) -> dict[str, object]:
    """Everything of this process that a sandbox could leave behind; without what lies below ``others``."""
    own = [child for child in psutil.Process().children() if child.pid not in others]
    return {
        "children": sorted(p.pid for child in own for p in (child, *child.children(recursive=True))),
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "mounts": Path("/proc/self/mounts").read_text(),
    }


async def test_cycles_leave_nothing(runtime: AttachedRuntime, runtime_dir: Path, others: set[int]) -> None:
    async def cycle(number: int) -> None:
        sandbox = await runtime.start(SandboxSpec(f"cycle-{number}"))
        await bash(sandbox, "sleep 800 & setsid sleep 801 & mkdir -p a/b; touch a/b/c; chmod 0 a/b a; ln -s / up")
        await sandbox.stop()

    await cycle(0)
    before, files = belongings(others), sorted(runtime_dir.rglob("*"))
    cycles = 100 if "local" in runtime.description else 12
    for start in range(0, cycles, 4):
        await asyncio.gather(*(cycle(number) for number in range(start, start + 4)))
    assert belongings(others) == before
    assert sorted(runtime_dir.rglob("*")) == files
    assert list(marked_processes(runtime_dir)) == []


async def test_close_ends_what_is_still_there(runtime: AttachedRuntime, runtime_dir: Path) -> None:
    sandboxes = [await runtime.start(SandboxSpec(f"s-{n}")) for n in range(3)]
    servers = [psutil.Process(s._connected().server_pid) for s in sandboxes]
    running = asyncio.create_task(bash(sandboxes[0], "sleep 600", timeout_s=700))
    await asyncio.sleep(0.2)
    await runtime.close()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], SandboxError)
    assert not any(server.is_running() for server in servers)
    assert list(runtime_dir.iterdir()) == []
    with pytest.raises(SandboxError):
        await runtime.start(SandboxSpec("late"))


async def test_a_killed_tool_server_is_an_error_and_still_cleaned_up(
    runtime: AttachedRuntime, runtime_dir: Path
) -> None:
    sandbox = await runtime.start(SandboxSpec("a"))
    await bash(sandbox, "sleep 900 & setsid sleep 901 &")
    os.kill(sandbox._connected().server_pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="tool server"):
        await bash(sandbox, "true")
    await sandbox.stop()
    assert list(marked_processes(runtime_dir)) == []


async def test_a_cancelled_start_leaves_nothing(runtime: AttachedRuntime, runtime_dir: Path, others: set[int]) -> None:
    before, files = belongings(others)["children"], sorted(runtime_dir.rglob("*"))
    for delay in (0.0, 0.01, 0.05, 0.1):
        task = asyncio.create_task(runtime.start(SandboxSpec("a")))
        await asyncio.sleep(delay)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.stop()
    assert belongings(others)["children"] == before
    assert sorted(runtime_dir.rglob("*")) == files


WORKER = """
import asyncio, sys
from pathlib import Path
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.sandbox.factory import make_runtime
from prorl_hpc.sandbox.protocol import SandboxSpec

async def main():
    runtime = await make_runtime(SandboxConfig(kind=sys.argv[1]), Path(sys.argv[2]), "run")
    sandboxes = [await runtime.start(SandboxSpec(f"s-{n}")) for n in range(2)]
    for sandbox in sandboxes:
        await sandbox.call("bash", {"command": "sleep 1000 & setsid sleep 1001 & (trap '' TERM HUP; sleep 1002) &"}, 20)
    print(*(sandbox._connected().server_pid for sandbox in sandboxes), flush=True)
    await sandboxes[0].call("bash", {"command": "sleep 1003"}, 2000)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_worker_leaves_no_process_and_the_next_one_sweeps(kind: str, runtime_dir: Path) -> None:
    await (await prepared(kind, runtime_dir)).close()  # skips where it does not work
    argv = [sys.executable, "-c", textwrap.dedent(WORKER), kind, str(runtime_dir)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
        assert worker.stdout is not None
        servers = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        assert len(servers) == 2
        everything = [p for server in servers for p in (server, *server.children(recursive=True))]
        assert len(everything) >= 10
        assert not any(runtime_dir in path.parents for path in sweep(runtime_dir))  # the worker lives
        worker.kill()
    _, alive = psutil.wait_procs(everything, timeout=20)
    assert alive == []
    sweep(runtime_dir)  # or another worker of this user's has done it
    assert list(runtime_dir.iterdir()) == []


async def test_a_stop_goes_on_when_who_asked_is_cancelled(runtime: AttachedRuntime) -> None:
    sandbox = await runtime.start(SandboxSpec("a"))
    box = sandbox._box.path
    stop = asyncio.create_task(sandbox.stop())
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    async with asyncio.timeout(20):
        while not sandbox.stopped:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not box.exists()
