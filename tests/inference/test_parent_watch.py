"""Processes that a killed parent leaves behind end by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.vllm_process import VllmProcess
from prorl_hpc.inference.vllm_settings import VllmSettings

PATIENCE_S = 30.0
FAMILY = """
    import multiprocessing, os, sys, time
    from pathlib import Path
    from prorl_hpc.inference.parent_watch import end_with_parent

    def live(depth, how, late_s, directory):
        Path(directory, f"{depth}.new").write_text(str(os.getpid()))
        Path(directory, f"{depth}.new").rename(Path(directory, str(depth)))
        time.sleep(late_s * depth)
        if how == "spawn" or depth == 0:
            end_with_parent()
            end_with_parent()
        if depth < 2:
            multiprocessing.get_context(how).Process(target=live, args=(depth + 1, how, late_s, directory)).start()
        time.sleep(3600)

    if __name__ == "__main__":
        live(0, sys.argv[1], float(sys.argv[2]), sys.argv[3])
"""


def gone(pid: int) -> bool:
    """A zombie that nobody has waited for is gone too."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: list[int]) -> list[int]:
    """Those that are still there when patience ends; they are killed then."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if not gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def start_family(directory: Path, how: str, late_s: float = 0.0) -> subprocess.Popen[bytes]:
    """A process, its child, and that one's child: each writes its pid into a file, and asks to be ended with its parent
    (with fork, only the eldest does, as in vLLM), the younger the later."""
    script = directory / "family.py"
    script.write_text(textwrap.dedent(FAMILY))
    return subprocess.Popen([sys.executable, script, how, str(late_s), directory])


def wait_pids(directory: Path, count: int) -> list[int]:
    deadline = time.monotonic() + PATIENCE_S
    files = [directory / str(depth) for depth in range(count)]
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_children_and_grandchildren_end_with_a_killed_parent(tmp_path: Path, how: str) -> None:
    eldest = start_family(tmp_path, how)
    pids = wait_pids(tmp_path, 3)
    assert pids[0] == eldest.pid
    time.sleep(1.2)  # a look at living parents ends nobody
    assert not any(map(gone, pids))
    eldest.kill()
    eldest.wait()
    assert wait_gone(pids[1:]) == []


def test_one_whose_parent_died_before_it_looked_ends_too(tmp_path: Path) -> None:
    eldest = start_family(tmp_path, "spawn", late_s=1.0)
    _, child = wait_pids(tmp_path, 2)
    eldest.kill()
    eldest.wait()
    assert wait_gone([child]) == []
    assert not (tmp_path / "2").exists()  # it came to nothing more


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'prorl_hpc[vllm]'")
async def test_the_engine_of_a_vllm_server_ends_with_its_launcher(tiny_model: Path, socket_dir: Path) -> None:
    """With nobody there to clean up, as when the agent is killed too."""
    engine = EngineConfig(dtype="float32", kv_cache_mib=64, max_parallel_requests=4, start_timeout_s=600)
    settings = VllmSettings(engine, tiny_model, 256, socket_dir / "v.sock", socket_dir / "cache", [])
    server = VllmProcess(settings, socket_dir / "v.log")
    await server.start(lambda text: None)
    try:
        children = [process.pid for process in psutil.Process(server.pid).children(recursive=True)]
        assert children
        os.kill(server.pid, signal.SIGKILL)
        assert wait_gone(children) == []
    finally:
        await server.stop()
