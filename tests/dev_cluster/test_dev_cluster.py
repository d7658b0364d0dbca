"""``prorl-hpc dev cluster``: real Slurm of one's own that can be broken on purpose, and that leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorl_hpc.cli.dev import main
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.private.base import PrivateSlurm, missing
from prorl_hpc.slurm.private.ending import processes_of
from prorl_hpc.slurm.private.namespaced import NamespacedSlurm
from prorl_hpc.slurm.private.opening import make_cluster, open_cluster, start_cluster
from prorl_hpc.slurm.private.shape import Shape

pytestmark = pytest.mark.slurm
START = [sys.executable, "-m", "prorl_hpc", "dev", "cluster", "start"]
SMALL = ["--cpu-nodes", "1", "--gpu-nodes", "1", "--kill-wait", "1"]


def needs(kind: str) -> None:
    if reason := missing(kind):
        pytest.skip(reason)


def wait_until(reached: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamespacedSlurm]:
    """A namespaced cluster that this module may break."""
    needs("namespaced")
    directory = tmp_path_factory.mktemp("own")
    shape = Shape(
        kind="namespaced", cpu_nodes=2, gpu_nodes=1, gpus=4, kill_wait_s=3, share_tmpfs={str(directory / "small"): "2m"}
    )
    cluster = start_cluster(directory, shape)
    assert isinstance(cluster, NamespacedSlurm)
    yield cluster
    cluster.stop()
    assert traces(directory) == []


def traces(directory: Path) -> list[str]:
    """Processes, mounts and sockets that name the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(directory) in words:
                found.append(f"{entry.name}: {words[:200]!r}")
    return found + [line for line in Path("/proc/mounts").read_text().splitlines() if str(directory) in line]


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def hostname_from(cluster: PrivateSlurm, node: str) -> str:
    done = cluster.run(["srun", "-w", node, "--immediate=20", "hostname"])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_node_that_crashed_serves_again_after_it_is_booted(own: NamespacedSlurm) -> None:
    for _ in range(2):
        own.crash("cpu01")
        assert own.run(["true"], node="cpu02").returncode == 0
        own.boot("cpu01")
        assert hostname_from(own, "cpu01") == "cpu01"


def test_a_node_that_crashed_while_a_job_was_ending_takes_the_next_at_once(own: NamespacedSlurm) -> None:
    for _ in range(3):
        waiting = subprocess.Popen(own.command(["srun", "-w", "cpu01", "sh", "-c", "trap '' TERM; sleep 60"]))
        wait_until(lambda: own.states()["cpu01"] in ("mixed", "allocated"), "the job runs")
        own.run(["scancel", "-u", str(os.getuid())])
        own.crash("cpu01")
        own.boot("cpu01")
        assert hostname_from(own, "cpu01") == "cpu01"
        waiting.kill()
        waiting.wait()


def test_a_dead_node_is_not_killed_twice_nor_a_living_one_booted(own: NamespacedSlurm) -> None:
    with pytest.raises(ConfigError, match="cpu01 is on already"):
        own.boot("cpu01")
    own.crash("cpu01")
    (own.directory / "run" / "cpu01.init").write_text(f"{os.getpid()}\n")  # the number is another process's by now
    for act in (own.crash, own.kill_slurmd):
        with pytest.raises(ConfigError, match="cpu01 is not up"):
            act("cpu01")
    own.boot("cpu01")
    assert hostname_from(own, "cpu01") == "cpu01"


def test_a_node_that_is_known_to_be_down_comes_back_too(own: NamespacedSlurm) -> None:
    own.crash("cpu02")
    wait_until(lambda: own.states()["cpu02"].startswith("down"), "cpu02 is down")
    own.boot("cpu02")
    assert hostname_from(own, "cpu02") == "cpu02"


def test_steps_outlive_their_slurmd(own: NamespacedSlurm) -> None:
    mark = own.shared / "over"
    sleeping = subprocess.Popen(
        own.command(["srun", "-w", "cpu01", "sh", "-c", f"touch {mark}.begun; sleep 2; touch {mark}"])
    )
    wait_until(mark.with_suffix(".begun").exists, "the step runs")
    own.kill_slurmd("cpu01")
    own.start_slurmd("cpu01")
    assert sleeping.wait(60) == 0
    assert mark.exists()


def test_a_cable_that_is_cut_and_healed(own: NamespacedSlurm) -> None:
    ping = ["bash", "-c", f"exec 3<>/dev/tcp/{own.address('cpu01')}/6818"]
    assert own.run(ping).returncode == 0
    own.cut("cpu01")
    assert own.run(["timeout", "1", *ping]).returncode != 0
    own.heal("cpu01")
    assert own.run(["timeout", "20", *ping]).returncode == 0


def test_the_nodes_share_a_small_file_system(own: NamespacedSlurm) -> None:
    (small,) = own.shape.share_tmpfs
    filled = own.run(["dd", "if=/dev/zero", f"of={small}/zeros", "bs=1M", "count=4"], node="cpu01")
    assert "No space left" in filled.stderr
    assert own.run(["stat", "-c", "%s", f"{small}/zeros"], node="gpu01").stdout.strip() == str(2 << 20)
    assert list(Path(small).iterdir()) == []
    assert own.run(["rm", f"{small}/zeros"]).returncode == 0


def test_the_sizes_are_as_asked_for(own: NamespacedSlurm) -> None:
    assert own.states() == dict.fromkeys(["cpu01", "cpu02", "gpu01"], "idle")
    seen = own.run(["srun", "-p", "gpu", "--gpus-per-node=4", "printenv", "CUDA_VISIBLE_DEVICES"])
    assert seen.stdout == "0,1,2,3\n"
    assert "KillWait                = 3 sec" in own.run(["scontrol", "show", "config"]).stdout


@pytest.mark.parametrize("kind", ["mini", "namespaced"])
@pytest.mark.parametrize("dies", ["holder", "outer", "inner", "outer_by_term"])
def test_nothing_is_left_however_the_leash_ends(tmp_path: Path, kind: str, dies: str) -> None:
    needs(kind)
    before = interfaces()
    directory = tmp_path / "held"
    # The holder of the leash is a process of its own here, so that it can be killed; a job runs meanwhile.
    command = [*START, str(directory), "--kind", kind, "--until-eof", *SMALL]
    holder_code = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); print(p.pid, flush=True); p.wait()"
    holder = subprocess.Popen([sys.executable, "-c", holder_code, *command], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    said = [holder.stdout.readline() for _ in range(2)]
    outer = int(next(line for line in said if line.strip().isdigit()))
    cluster = open_cluster(directory)
    mark = cluster.shared / "job"
    script = f"--wrap=trap '' TERM; touch {mark}; sleep 600 & wait; wait"
    assert cluster.run(["sbatch", f"--output={cluster.shared}/%j.out", script]).returncode == 0
    wait_until(mark.exists, "the job runs")
    children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    pid, number = {
        "holder": (holder.pid, signal.SIGKILL),
        "outer": (outer, signal.SIGKILL),
        "inner": (int(children[0]), signal.SIGKILL),
        "outer_by_term": (outer, signal.SIGTERM),
    }[dies]
    os.kill(pid, number)
    wait_until(lambda: not traces(directory), f"everything is gone; left: {traces(directory)}")
    assert processes_of(cluster.conf) == []
    assert interfaces() == before
    holder.wait(10)


def test_a_cluster_whose_directory_was_removed_can_be_stopped(tmp_path: Path) -> None:
    needs("namespaced")
    directory = tmp_path / "removed"
    started = subprocess.run([*START, str(directory), "--kind", "namespaced", *SMALL], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    cluster = open_cluster(directory)
    assert traces(directory)
    shutil.rmtree(directory / "run")
    cluster.stop()
    wait_until(lambda: not traces(directory), f"everything is gone; left: {traces(directory)}")


def test_a_cluster_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    needs("mini")
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "etc").write_text("not a directory")
    done = subprocess.run(
        [*START, str(directory), "--until-eof"], stdin=subprocess.PIPE, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert str(directory) in done.stderr and "did not start" in done.stderr
    assert traces(directory) == []


def test_a_directory_can_be_used_again(tmp_path: Path) -> None:
    needs("mini")
    shape = Shape(cpu_nodes=1, gpu_nodes=0)
    for _ in range(2):  # the second start ends what the first left
        cluster = start_cluster(tmp_path, shape)
        assert cluster.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap=true"]).stdout == "1\n"
    assert len([pid for pid in processes_of(cluster.conf) if _name(pid) == "slurmctld"]) == 1
    assert main(["cluster", "stop", str(tmp_path)]) == 0
    assert traces(tmp_path) == []
    assert main(["cluster", "stop", str(tmp_path)]) == 0


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_a_cluster_that_runs_is_not_started_again(own: NamespacedSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    before = (own.directory / "cluster.json").read_bytes(), processes_of(own.conf)
    assert main(["cluster", "start", str(own.directory)]) == 1
    assert "has a cluster already, which runs" in capsys.readouterr().err
    assert ((own.directory / "cluster.json").read_bytes(), processes_of(own.conf)) == before


def test_run_gives_back_the_exit_code(own: NamespacedSlurm, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "run", str(own.directory), "--node", "cpu02", "--", "sh", "-c", "hostname; exit 7"]) == 7
    assert capfd.readouterr().out == "cpu02\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["start", "{dir}", "--cpu-nodes", "0"], "--cpu-nodes 0: expected 1 to 80"),
        (["start", "{dir}", "--share-tmpfs", "small"], "--share-tmpfs small: expected PATH:SIZE"),
        (["start", "{dir}", "--share-tmpfs", "/x:1m"], "--share-tmpfs needs --kind namespaced"),
        (["stop", "{dir}"], "holds no private cluster"),
        (["crash", "{dir}", "cpu01"], "holds no private cluster"),
    ],
)
def test_wrong_use_is_told(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["cluster", *(word.format(dir=tmp_path) for word in words)])


def test_wrong_nodes_and_kinds_are_told(tmp_path: Path) -> None:
    Shape(kind="mini").write(tmp_path)
    with pytest.raises(ConfigError, match="crash needs a cluster of --kind namespaced"):
        main(["cluster", "crash", str(tmp_path), "cpu01"])
    with pytest.raises(ConfigError, match="no node cpu9: there are cpu01, cpu02"):
        main(["cluster", "kill-slurmd", str(tmp_path), "cpu9"])
    assert make_cluster(tmp_path, Shape.read(tmp_path)).kind == "mini"
