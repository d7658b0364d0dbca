"""A whole run whose servers record their requests, through two starts of one of its agents."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from small_run import small_config, small_run

from prorl_hpc.bench.fit import fit
from prorl_hpc.inference.request_records import read_requests
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import Status

pytestmark = pytest.mark.timeout(120)


async def test_every_turn_is_recorded_and_a_restarted_agent_goes_on(tmp_path: Path, socket_dir: Path) -> None:
    config = small_config(tmp_path, socket_dir)
    config.engine.record_requests = True
    config.engine.script = {"token_s": 0.001, "cache_tokens": 10_000, "block_size": 16}
    turns = 0
    async with small_run(config) as run:
        await run.ready("coordinator", "worker-0", "inference-0")
        async with run.client() as client:
            for batch in ("a", "b"):
                await client.submit_batch(run.order(batch, groups=4))
                result = await client.wait_batch(batch)
                rollouts = [rollout for group in result.groups for rollout in group.rollouts]
                assert {rollout.status for rollout in rollouts} == {Status.DONE}
                turns += sum(segment.trained for rollout in rollouts for segment in rollout.trajectory.segments)
                if batch == "a":
                    before = run.state("inference-0")
                    assert before is not None
                    os.kill(before.pid, signal.SIGKILL)
                    while (now := run.state("inference-0")) is None or now.pid == before.pid:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
    (server,) = read_requests(run.run.requests)
    assert (server.server, [by.engine for by in server.served_by]) == ("inference-0", ["scripted", "scripted"])
    ended = [record for record in server.records if record.reason in ("stop", "length")]
    assert len(ended) >= turns > 0
    assert any(record.cached_tokens for record in ended)
    with pytest.raises(ConfigError, match="a fit needs"):
        fit(run.run.path)
