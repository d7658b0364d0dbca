"""Real vLLM over two processes of this machine: tensor parallel on one node, and as two nodes of one server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_cases import CONTEXT, PROMPT, ModelReference, new_secret
from waiting import until

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.server_group import ServerGroup
from prorl_hpc.inference.vllm_engine import VllmEngine
from prorl_hpc.inference.vllm_group import GroupMember, LeaderProcess
from prorl_hpc.inference.vllm_process import VllmProcess, group_alive
from prorl_hpc.inference.vllm_settings import VllmSettings
from prorl_hpc.messages.inference import VersionSpan, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.transport.weight_server import WeightServer
from prorl_hpc.transport.weight_stream import read_key

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # of a busy machine: four vLLM processes are started
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'prorl_hpc[vllm]'"),
]
SPREAD = EngineConfig(
    tensor_parallel=2, dtype="float32", kv_cache_mib=64, max_parallel_requests=4, restarts=1, start_timeout_s=900
)


def settings(model: Path, directory: Path, name: str) -> VllmSettings:
    socket, secret = directory / f"{name}.sock", directory / "stream.secret"
    return VllmSettings(SPREAD, model, CONTEXT, socket, directory / name, [], weight_secret=secret)


@asynccontextmanager
async def one_node(model: Path, directory: Path) -> AsyncIterator[VllmEngine]:
    make = functools.partial(VllmProcess, settings(model, directory, "a"), directory / "a.log")
    engine = VllmEngine(make, "two-processes", CONTEXT, restarts=0)
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def two_nodes(model: Path, directory: Path) -> AsyncIterator[tuple[VllmEngine, GroupMember]]:
    group = ServerGroup(directory, "inference-0", 2)
    make = functools.partial(
        LeaderProcess, settings(model, directory, "a"), directory / "a.log", group, "127.0.0.1", 20.0
    )
    engine = VllmEngine(make, "inference-0", CONTEXT, restarts=1)
    member = GroupMember(settings(model, directory, "b"), directory / "b.log", group, 1)
    serving = asyncio.create_task(member.serve(lambda text: None))
    try:
        yield engine, member
    finally:
        await engine.stop()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await member.stop()


async def check(engine: VllmEngine, model: Path, weights: Path) -> None:
    """It answers as the model does, before and after new weights, from files and from a stream to each rank."""
    reference = ModelReference(model, weights)
    secret = engine._process.settings.weight_secret
    assert secret is not None
    stream = WeightServer("127.0.0.1", read_key(new_secret(secret.parent)))
    for version in (0, 1, 2):
        if version == 1:
            await engine.update_weights(WeightUpdate(version, reference.files(version)))
        if version == 2:
            await engine.update_weights(WeightUpdate(version, [], source=stream.offer(reference.tensors(version))))
        answer = await engine.generate(f"r{version}", PROMPT, SamplingParams(max_tokens=6, seed=1), 50)
        expected = reference.scores(PROMPT + answer.token_ids, version)[len(PROMPT) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        assert answer.versions == [VersionSpan(version, 0, len(answer.token_ids))]
    stream.close()


async def test_tensor_parallel_on_one_node(tiny_model: Path, socket_dir: Path, tmp_path: Path) -> None:
    async with one_node(tiny_model, socket_dir) as engine:
        await engine.start(lambda text: None)
        pid = engine._process.pid
        await check(engine, tiny_model, tmp_path)
    assert not group_alive(pid)


async def test_a_server_of_two_nodes_and_its_whole_restart(tiny_model: Path, socket_dir: Path, tmp_path: Path) -> None:
    async with two_nodes(tiny_model, socket_dir) as (engine, member):
        await engine.start(lambda text: None)
        await check(engine, tiny_model, tmp_path)
        first, part = engine._process, member._process
        assert part is not None
        await part.note_kin()  # as it does now and then
        shared = part._kin._shared_memory | first._kin._shared_memory
        assert shared
        part.kill()
        await until(lambda: not first.alive)
        assert "its member on node 2 is dead" in first.obituary("died")
        await until(lambda: engine._process is not first and engine.serving, patience_s=900)
        assert engine.weight_version == 0
        await engine.generate("again", PROMPT, SamplingParams(max_tokens=2), 50)
        pids = [engine._process.pid, part.pid]
    assert not any(group_alive(pid) for pid in pids)
    assert not list(socket_dir.glob("*.group"))
    assert not [path for path in shared if path.exists()]
