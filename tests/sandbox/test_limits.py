"""Limits: where control groups are found, what is written into them, and the watch that holds where there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sandbox_runtimes import prepared

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import attached_runtime
from prorl_hpc.sandbox.cgroups import Cgroups, GroupLimits, Tree, group_name, remove_recorded
from prorl_hpc.sandbox.limits import held_here, server_limits
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec

LIMITS = GroupLimits(memory_mib=64, processes=10, cpus=0.5)
SMALL = SandboxConfig(max_processes=64, max_memory_mib=128, max_disk_mib=16, max_file_mib=512, start_retries=0)

# --- groups, in a hierarchy of files ---------------------------------------------------------------

FILES = {
    2: {
        "cgroup.procs": "",
        "cgroup.controllers": "cpuset cpu memory pids",
        "cgroup.subtree_control": "",
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.events": "low 0\noom 0\noom_kill 0\n",
        "pids.max": "max",
        "cpu.max": "max 100000",
    },
    1: {
        "cgroup.procs": "",
        "memory.limit_in_bytes": "",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "pids.max": "max",
        "cpu.cfs_quota_us": "-1",
        "cpu.cfs_period_us": "100000",
    },
}


class Files(Tree):
    """A hierarchy that is a directory: a group has its files as soon as it is made."""

    def __init__(self, version: int) -> None:
        self.version = version

    def make(self, path: Path) -> None:
        path.mkdir(parents=True)
        for name, content in FILES[self.version].items():
            (path / name).write_text(content)

    def remove(self, path: Path) -> None:
        if any(entry.is_dir() for entry in path.iterdir()):
            raise OSError("groups below")
        if (path / "cgroup.procs").read_text().strip():
            raise OSError("processes in it")
        shutil.rmtree(path)


def proc(directory: Path, groups: str, mounts: list[str]) -> Path:
    """Like /proc/self of a process in these groups."""
    directory.mkdir()
    (directory / "cgroup").write_text(groups)
    lines = ["21 1 8:1 / / rw - ext4 /dev/sda rw", *mounts]
    (directory / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return directory


@pytest.fixture
def version_2(tmp_path: Path) -> tuple[Path, Path]:
    """(the group above ours, which hands on memory and pids; /proc/self)."""
    own = tmp_path / "fs/user.slice/app.scope"
    for group in (tmp_path / "fs", own.parent, own):
        Files(2).make(group) if not group.exists() else None
    (own.parent / "cgroup.subtree_control").write_text("memory pids")
    (own / "cgroup.controllers").write_text("memory pids")
    (own / "cgroup.procs").write_text("1\n")  # somebody else's, too: it cannot be opened
    mount = f"30 21 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw"
    return own.parent, proc(tmp_path / "self", "0::/user.slice/app.scope\n", [mount])


def test_a_group_of_version_2_is_made_where_controllers_are_handed_on(version_2: tuple[Path, Path]) -> None:
    above, own = version_2
    (above / "app.scope/cgroup.procs").chmod(0o444)
    if os.getuid() == 0:  # root writes to all: then it is our own group that must not do
        (above / "app.scope/cgroup.controllers").write_text("")
    groups = Cgroups.find(own, Files(2))
    if os.getuid() != 0:
        assert groups.holding("memory") == ""  # what is not ours to move out of is not ours to use
        return
    assert [groups.holding(name) for name in ("memory", "pids", "cpu")] == ["cgroup v2", "cgroup v2", ""]
    group = groups.make("prorl-0-run.sb-1-0.1", LIMITS)
    outer = above / "prorl-0-run.sb-1-0.1"
    read = {name: (outer / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert read == {"memory.max": str(64 << 20), "memory.swap.max": "0", "pids.max": "10", "cpu.max": "max 100000"}
    group.add(4711)
    assert (outer / "in/cgroup.procs").read_text() == "4711"
    assert group.oom_kills() == 0
    (outer / "memory.events").write_text("oom 1\noom_kill 3\n")
    assert group.oom_kills() == 3
    (outer / "in/cgroup.procs").write_text("")
    group.remove()
    assert not outer.exists()


def test_the_groups_of_a_slurm_step_are_left_as_they_are(tmp_path: Path) -> None:
    step = "system.slice/slurmstepd.scope/job_7/step_0"
    task = tmp_path / "fs" / step / "user/task_0"
    for group in (tmp_path / "fs", *reversed(task.relative_to(tmp_path / "fs").parents)):
        path = tmp_path / "fs" / group
        if not path.exists():
            Files(2).make(path)
        (path / "cgroup.subtree_control").write_text("memory pids")
    Files(2).make(task)
    (task / "cgroup.procs").write_text(f"{os.getpid()}\n")
    mount = f"30 21 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw"
    groups = Cgroups.find(proc(tmp_path / "self", f"0::/{step}/user/task_0\n", [mount]), Files(2))
    assert groups.holding("memory") == ""
    assert (task / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert [path.name for path in task.parent.iterdir() if path.is_dir()] == ["task_0"]


def test_our_own_group_is_opened_where_all_in_it_is_ours(tmp_path: Path) -> None:
    own = tmp_path / "fs/scope"
    Files(2).make(tmp_path / "fs")
    Files(2).make(own)
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    mount = f"30 21 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw"
    Cgroups.find(proc(tmp_path / "self", "0::/scope\n", [mount]), Files(2))
    others = own / f"prorl-{os.getuid()}-others"
    assert (others / "cgroup.procs").read_text() == str(os.getpid())
    assert (own / "cgroup.subtree_control").read_text() == "+cpu"  # the last of those that were asked for


def test_groups_of_version_1_are_made_in_each_hierarchy(tmp_path: Path) -> None:
    for path in ("memory/job_7", "pids", "cpu,cpuacct/job_7"):
        Files(1).make(tmp_path / path)
    mounts = [f"3{n} 21 0:2{n} / {tmp_path}/{n} rw - cgroup cgroup rw,{n}" for n in ("memory", "pids", "cpu,cpuacct")]
    groups = "9:name=systemd:/\n8:pids:/\n4:memory:/job_7\n2:cpu,cpuacct:/job_7\n0::/\n"
    found = Cgroups.find(proc(tmp_path / "self", groups, mounts), Files(1))
    assert [found.holding(name) for name in ("memory", "pids", "cpu")] == ["cgroup v1"] * 3
    group = found.make("g", LIMITS)
    assert (tmp_path / "memory/job_7/g/memory.limit_in_bytes").read_text() == str(64 << 20)
    assert (tmp_path / "pids/g/pids.max").read_text() == "10"
    assert (tmp_path / "cpu,cpuacct/job_7/g/cpu.cfs_quota_us").read_text() == "50000"
    (tmp_path / "memory/job_7/g/in/memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert group.oom_kills() == 2
    group.remove()
    assert list(tmp_path.glob("**/g")) == []


def test_a_place_that_fails_its_trial_is_not_used(tmp_path: Path) -> None:
    Files(1).make(tmp_path / "memory")
    mount = f"30 21 0:26 / {tmp_path}/memory rw - cgroup cgroup rw,memory"
    found = Cgroups.find(proc(tmp_path / "self", "4:memory:/gone\n", [mount]), Tree())
    assert found.holding("memory") == "" and found.make("g", LIMITS) is None


def test_limits_of_zero_are_not_set(tmp_path: Path) -> None:
    Files(1).make(tmp_path / "memory")
    mount = f"30 21 0:26 / {tmp_path}/memory rw - cgroup cgroup rw,memory"
    found = Cgroups.find(proc(tmp_path / "self", "4:memory:/\n", [mount]), Files(1))
    found.make("g", GroupLimits())
    assert (tmp_path / "memory/g/memory.limit_in_bytes").read_text() == ""


def test_recorded_groups_are_removed_and_nothing_else(tmp_path: Path) -> None:
    Files(1).make(tmp_path / "memory")
    mount = f"30 21 0:26 / {tmp_path}/memory rw - cgroup cgroup rw,memory"
    found = Cgroups.find(proc(tmp_path / "self", "4:memory:/\n", [mount]), Files(1))
    name, other = [group_name(Path(f"/tmp/prorl-{os.getuid()}-run/sb-12-0") / box) for box in ("1", "10")]
    assert name == f"prorl-{os.getuid()}-run.sb-12-0.1"
    record = tmp_path / "groups"
    found.make(other, LIMITS, record)
    found.make(name, LIMITS, record)
    record.write_text(f"{record.read_text()}{tmp_path}/memory\n")  # not a name of ours
    remove_recorded(record, Files(1))
    assert [path.name for path in (tmp_path / "memory").glob("*/")] == [other]


# --- groups, the kernel's ----------------------------------------------------------------------------


def test_the_kernel_holds_a_group_to_its_limits_and_its_removal_ends_what_is_in_it() -> None:
    groups = Cgroups.find()
    if not groups.holding("memory"):
        pytest.skip("no memory control group can be made here")
    group = groups.make(f"prorl-{os.getuid()}-test.sb-{os.getpid()}-0.1", LIMITS)
    program = "input(); import subprocess as s; s.Popen(['sleep', '600']); x = bytearray(1 << 28)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True)
    try:
        group.add(process.pid)
        process.communicate(b"\n", timeout=30)
        assert process.returncode == -9 and group.oom_kills() == 1
    finally:
        group.remove()
    left = [p.pid for p in psutil.process_iter() if p.status() != "zombie" and _session(p.pid) == process.pid]
    assert left == []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_what_is_gone_cannot_be_added() -> None:
    groups = Cgroups.find()
    if not groups.holding("memory"):
        pytest.skip("no memory control group can be made here")
    group = groups.make(f"prorl-{os.getuid()}-test.sb-{os.getpid()}-0.2", LIMITS)
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(SandboxError, match=f"process {process.pid} cannot be put"):
        group.add(process.pid)
    group.remove()


# --- the watch, where there are no groups ------------------------------------------------------------


@pytest.fixture(params=["local", pytest.param("apptainer", marks=pytest.mark.apptainer)])
async def sandbox(request: pytest.FixtureRequest, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch):
    class NoGroups(Cgroups):
        @classmethod
        def find(cls, *_: object) -> Cgroups:
            return Cgroups()

    monkeypatch.setattr(attached_runtime, "Cgroups", NoGroups)
    runtime = await prepared(request.param, runtime_dir, SMALL)
    yield await runtime.start(SandboxSpec("a"))
    await runtime.close()


async def output(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.call("bash", {"command": command}, 20.0)).output


async def test_memory_beyond_the_limit_costs_the_biggest_process(sandbox: Sandbox) -> None:
    said = await output(sandbox, "mine=1; python3 -c 'x = []\nwhile True: x.append(bytearray(4 << 20))'")
    assert "MiB of memory, 128 are allowed: process python3 was killed]" in said
    assert await output(sandbox, "echo $mine") == "1\n"


async def test_disk_beyond_the_limit_costs_what_runs_and_files_can_be_deleted(sandbox: Sandbox) -> None:
    said = await output(sandbox, "mine=1; head -c 40M /dev/zero > big; exec 3>&1; sleep 600")
    assert "MiB of disk, 16 are allowed: what ran was killed" in said
    assert await output(sandbox, "rm big; sleep 0.5; echo $mine") == "1\n"
    assert (await sandbox.stats()).disk_bytes < 1 << 20


async def test_an_idle_interpreter_is_spared_and_a_busy_one_is_not(sandbox: Sandbox) -> None:
    cells = {"mine": "kept = 1", "idle": "kept = 2"}
    for kernel, code in cells.items():
        assert (await sandbox.call("ipython", {"code": code, "kernel": kernel}, 60.0)).exit_code == 0
    said = await output(sandbox, "head -c 40M /dev/zero > big; sleep 600")
    assert "what ran was killed" in said
    code = "import time; open('more', 'wb').write(bytes(60 << 20)); time.sleep(600)"
    await output(sandbox, "rm big; sleep 0.5")
    busy = await sandbox.call("ipython", {"code": code, "kernel": "mine"}, 60.0)
    assert "what ran was killed" in busy.output and "ended by SIGKILL" in busy.output
    await output(sandbox, "rm more; sleep 0.5")
    kept = await sandbox.call("ipython", {"code": "kept", "kernel": "idle"}, 60.0)
    assert kept.output == "2\n"


async def test_a_cause_is_told_once_in_a_call(sandbox: Sandbox) -> None:
    said = await output(sandbox, "for n in 1 2 3; do head -c 24M /dev/zero > big; sleep 5; rm big; sleep 0.6; done")
    assert said.count("MiB of disk") == 1 and "(this is the last of " in said


async def test_a_file_that_reached_its_limit_is_told_of(sandbox: Sandbox) -> None:
    for tool, arguments in (
        ("bash", {"command": "dd if=/dev/zero of=big bs=1M seek=511 count=2"}),
        ("exec", {"argv": ["dd", "if=/dev/zero", "of=big", "bs=1M", "seek=511", "count=2"]}),
    ):
        result = await sandbox.call(tool, arguments, 20.0)
        assert result.exit_code == 153 and "a file reached the limit of 512 MiB]\n" in result.output
    assert "reached" not in await output(sandbox, "exit 3")


async def test_going_on_writing_ends_the_sandbox(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="16 are allowed, and it went on writing"):
        for number in range(20):
            await output(sandbox, f"head -c 40M /dev/zero > big{number}; sleep 2")


async def test_what_happened_in_the_background_is_told_to_the_next_call(sandbox: Sandbox) -> None:
    await output(sandbox, "(sleep 0.3; head -c 40M /dev/zero > big; sleep 600) & true")
    said = ""
    for _ in range(50):
        said += await output(sandbox, "sleep 0.1")
        if said:
            break
    assert "MiB of disk" in said
    assert "MiB of disk" not in await output(sandbox, "rm big; echo")


async def test_stats_count_processes_memory_disk_and_time(sandbox: Sandbox) -> None:
    before = await sandbox.stats()
    program = "x = bytearray(60 << 20); print(flush=True); sum(range(5000000)); import time; time.sleep(600)"
    await output(sandbox, f"(python3 -c '{program}' > started; true) & head -c 3M /dev/zero > f; ln f g; ln -s f h")
    await output(sandbox, "until [ -s started ]; do sleep 0.05; done; sleep 0.3")
    after = await sandbox.stats()
    assert after.processes - before.processes >= 1
    assert 60 << 20 <= after.memory_bytes - before.memory_bytes < 100 << 20
    assert 3 << 20 <= after.disk_bytes - before.disk_bytes < 4 << 20
    assert after.cpu_s > before.cpu_s


@pytest.mark.apptainer
async def test_too_few_processes_for_a_shell_are_said_to_be(runtime_dir: Path) -> None:
    with pytest.raises(SandboxError, match=r"no shell can be started.*max_processes=1: is that too few"):
        await prepared("apptainer", runtime_dir, replace(SMALL, max_processes=1))


def test_doctor_is_told_what_holds() -> None:
    held = {limit.limit: limit.by for limit in held_here(Cgroups())}
    assert held["cpu"] == "" and "watch" in held["memory"] and "watch" in held["disk"]
    assert server_limits(SMALL)["max_memory_mib"] == 128
