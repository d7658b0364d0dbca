"""The vLLM engine around its server process, with a fake server: death, restarts, refusals, ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import aiohttp
import pytest
from engine_cases import new_secret
from vllm_bench import FAKE, Bench
from waiting import until

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.protocol import ServerDown
from prorl_hpc.inference.vllm_engine import VllmEngine
from prorl_hpc.inference.vllm_process import group_alive
from prorl_hpc.inference.vllm_settings import VllmSettings
from prorl_hpc.messages.errors import ConfigError, InferenceError
from prorl_hpc.messages.inference import FinishReason, VersionSpan, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.weight_server import WeightServer
from prorl_hpc.transport.weight_stream import read_key


async def ask(engine: VllmEngine, first: int = 1) -> object:
    return await engine.generate(f"r{first}", [first, 2, 3], SamplingParams(), 50)


async def test_start_answer_stop_leaves_no_process(bench: Bench) -> None:
    engine = bench.engine()
    said: list[str] = []
    await engine.start(said.append)
    completion = await engine.generate("r", [1, 2, 3], SamplingParams(), 50)
    assert completion.token_ids == [5, 6] and completion.logprobs == [-0.5, -0.5]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.versions == [VersionSpan(0, 0, 2)]
    assert completion.cached_prompt_tokens == 1
    load = await engine.load()
    assert (load.running, load.waiting, load.prompt_tokens, load.generated_tokens) == (1, 0, 12, 3)
    pid = bench.processes[0].pid
    await engine.stop()
    await engine.stop()
    assert not group_alive(pid)
    assert not (bench.directory / "v.sock").exists()
    assert any("loading the model" in text or "importing" in text for text in said)
    with pytest.raises(InferenceError, match="was stopped"):
        await ask(engine)


async def test_a_server_that_dies_while_starting_is_named_with_its_last_words(bench: Bench) -> None:
    with pytest.raises(InferenceError, match=r"died while it was starting(?s:.*)No available memory"):
        await bench.engine(("die",)).start(lambda text: None)


async def test_a_server_that_never_answers_is_given_up_and_ended(bench: Bench) -> None:
    with pytest.raises(InferenceError, match="start_timeout_s=3"):
        await bench.engine(("hang",), start_timeout_s=3).start(lambda text: None)
    assert not group_alive(bench.processes[0].pid)


async def test_cancelling_the_start_ends_the_server(bench: Bench) -> None:
    engine = bench.engine(("hang",))
    loading = asyncio.Event()
    task = asyncio.create_task(engine.start(lambda text: loading.set()))
    await loading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not group_alive(bench.processes[0].pid)
    await engine.stop()


@pytest.mark.parametrize("mode", ["no-ids", "no-logprobs"])
async def test_an_answer_without_ids_or_logprobs_is_refused(bench: Bench, mode: str) -> None:
    engine = bench.engine((mode,))
    await engine.start(lambda text: None)
    with pytest.raises(InferenceError, match="inference-0 answers without what training needs"):
        await ask(engine)
    await engine.stop()


async def test_a_death_fails_what_is_in_flight_and_is_followed_by_a_restart(bench: Bench) -> None:
    engine = bench.engine(restarts=1)
    await engine.start(lambda text: None)
    weights = bench.directory / "w.safetensors"
    weights.touch()
    await engine.update_weights(WeightUpdate(4, [str(weights)]))
    assert engine.weight_version == 4
    waiting = asyncio.create_task(ask(engine, first=777))
    await asyncio.sleep(0)
    for first in (666, 777):
        with pytest.raises(ServerDown, match="illegal memory access"):
            await (waiting if first == 777 else ask(engine, first))
    with pytest.raises(ServerDown):
        await engine.load()
    first_pid = bench.processes[0].pid
    await until(lambda: len(bench.processes) == 2 and engine.serving)
    assert not group_alive(first_pid)
    assert engine.weight_version == 0
    await ask(engine)
    await engine.stop()


async def test_an_engine_beyond_its_restarts_is_broken(bench: Bench) -> None:
    engine = bench.engine((), ("die",), restarts=1)
    await engine.start(lambda text: None)
    os.kill(bench.processes[0].pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert "No available memory" in await engine.wait_broken()
    assert len(bench.processes) == 2
    assert not any(group_alive(process.pid) for process in bench.processes)
    with pytest.raises(InferenceError, match="No available memory"):
        await ask(engine)
    await engine.stop()


async def test_generation_resumes_even_if_the_weight_update_fails(bench: Bench) -> None:
    engine = bench.engine(("fail-update",))
    await engine.start(lambda text: None)
    weights = bench.directory / "w.safetensors"
    weights.touch()
    with pytest.raises(InferenceError, match="shape mismatch in layer 3"):
        await engine.update_weights(WeightUpdate(1, [str(weights)]))
    assert engine.weight_version == 0
    connector = aiohttp.UnixConnector(path=str(bench.directory / "v.sock"))
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://vllm/calls") as response:
        calls = await response.json()
    assert calls[-4:] == ["/pause", "/start_weight_update", "/update_weights", "/resume"]
    await engine.stop()


async def test_a_server_whose_stream_of_weights_broke_off_is_killed_and_gets_them_anew(bench: Bench) -> None:
    """It may have loaded some of them, and must not go on with those."""
    engine = bench.engine(("fail-update",), (), restarts=1)
    await engine.start(lambda text: None)
    stream = WeightServer("127.0.0.1", read_key(new_secret(bench.directory)))
    update = WeightUpdate(1, [], source=stream.offer([]))
    with pytest.raises(InferenceError, match="shape mismatch in layer 3"):
        await engine.update_weights(update)
    await until(lambda: not group_alive(bench.processes[0].pid))
    await engine.update_weights(update)  # as it is told again
    assert engine.weight_version == 1 and len(bench.processes) == 2
    await ask(engine)
    await engine.stop()
    stream.close()


async def test_the_server_and_its_children_die_with_a_parent_that_was_killed(socket_dir: Path) -> None:
    parent_source = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, {str(FAKE)!r}, {str(socket_dir / "v.sock")!r}],
                                 stdin=subprocess.PIPE, start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(3600)
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(parent_source), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pgid = int(await parent.stdout.readline())
    await until((socket_dir / "v.sock").exists)
    child = int((socket_dir / "v.sock.child").read_text())
    os.kill(child, 0)
    parent.kill()
    await parent.wait()
    await until(lambda: not running(pgid) and not running(child))


def running(pid: int) -> bool:
    """A zombie that init has not yet reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_and_environment_say_what_the_configuration_says(tmp_path: Path) -> None:
    config = EngineConfig(threads=2, block_size=16, kv_cache_mib=64, extra_args=["--seed", "1"], env={"A": "b"})
    settings = VllmSettings(config, tmp_path, 128, tmp_path / "s", tmp_path / "c", [])
    command, environment = settings.command(), settings.environment()
    assert command[-2:] == ["--seed", "1"]
    for flag, value in {"--dtype": "float32", "--block-size": "16", "--kv-cache-memory-bytes": "67108864"}.items():
        assert command[command.index(flag) + 1] == value
    assert environment["OMP_NUM_THREADS"] == "2" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["A"] == "b"


def test_on_gpus_it_uses_bfloat16_and_its_own_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_hpc.inference.vllm_settings.vllm_version", lambda: "0.32.0")
    settings = VllmSettings(EngineConfig(), tmp_path, 128, tmp_path / "s", tmp_path / "c", ["2", "3"])
    command, environment = settings.command(), settings.environment()
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert "--gpu-memory-utilization" in command and "--enforce-eager" not in command
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment


def test_a_package_that_is_not_installed_is_told_before_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from prorl_hpc.inference import vllm_settings

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(ConfigError, match="pip install -e"):
        vllm_settings.check_weight_plugin()
