"""Inference in whole small runs: servers from outside, and agents that are killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
from fake_vllm import serve_outside
from fakes.container import in_container, make_image
from small_run import small_config, small_run

from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import Status
from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.own_container_checks import container_problems

pytestmark = pytest.mark.timeout(120)


async def test_a_run_without_inference_nodes_uses_the_servers_from_outside(tmp_path: Path, socket_dir: Path) -> None:
    config = small_config(tmp_path, socket_dir)
    model = Path(config.model.path)
    async with (
        serve_outside(None, model=model) as first,
        serve_outside(socket_dir / "llm.sock", model=model) as second,
    ):
        config.cluster.inference.nodes = 0
        config.engine.outside = [first.url.removesuffix("/v1"), f"{second.url}#policy"]
        async with small_run(config) as run:
            await run.ready("coordinator", "worker-0")
            async with run.client() as client:
                servers = await client.servers()
                await client.submit_batch(run.order("b", groups=4))
                result = await client.wait_batch("b")
        assert [(server.server_id, server.url) for server in servers] == [
            ("outside-0", first.url),
            ("outside-1", second.url),
        ]
        assert {r.status for group in result.groups for r in group.rollouts} == {Status.DONE}
        assert first.bodies and second.bodies


async def test_a_killed_agent_is_started_again_and_gets_the_newest_weights(tmp_path: Path, socket_dir: Path) -> None:
    config = small_config(tmp_path, socket_dir)
    async with small_run(config) as run:
        await run.ready("coordinator", "worker-0", "inference-0")
        async with run.client() as client:
            await client.update_weights(WeightUpdate(3, ["scripted"]))
            await client.submit_batch(run.order("b", groups=24))
            while (await client.batch_progress("b")).rollouts_done == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            before = run.state("inference-0")
            assert before is not None
            os.kill(before.pid, signal.SIGKILL)
            result = await client.wait_batch("b")
            while (await client.servers())[0].weight_version != 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert {r.status for group in result.groups for r in group.rollouts} == {Status.DONE}
        rollouts = [rollout for group in result.groups for rollout in group.rollouts]
        segments = [segment for rollout in rollouts for segment in rollout.trajectory.segments]
        assert {segment.weight_version for segment in segments if segment.trained} == {3}
        assert [str(restart) for restart in read_restarts(run.run)] == [
            "inference-0 was killed by SIGKILL: started again (1 of 2)"
        ]
    assert read_failure(run.run) is None


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="needs Apptainer")
@pytest.mark.parametrize("sandbox", ["local", "apptainer"])
async def test_a_run_in_a_container_starts_its_sandboxes_there(tmp_path: Path, socket_dir: Path, sandbox: str) -> None:
    config = in_container(small_config(tmp_path, socket_dir), make_image(tmp_path / "image"))
    config.sandbox.kind = sandbox
    if sandbox == "apptainer" and any("user namespace" in problem for problem in container_problems(config)):
        pytest.skip("no user namespaces in user namespaces here")
    assert container_problems(config) == []
    async with small_run(config) as run:
        await run.ready("coordinator", "worker-0", "inference-0")
        async with run.client() as client:
            await client.submit_batch(run.order("b", groups=2))
            result = await client.wait_batch("b")
            assert [worker.sandbox.split()[0] for worker in await client.workers()] == [sandbox]
    assert {r.status for group in result.groups for r in group.rollouts} == {Status.DONE}
    assert read_failure(run.run) is None
    assert list(socket_dir.iterdir()) == []
