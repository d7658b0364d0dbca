"""``python -m fakes.ordering RUN_DIR GATES``, on the login node: orders four groups of four for each gate, waits for
them however often the service goes away, and writes ordered.json: what became of each rollout, and the stream."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchResult, BatchSpec, GroupFilter
from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.service.client import RolloutClient

PATIENCE_S = 300.0


async def ordered(run: RunDirectory, spec: BatchSpec) -> tuple[BatchResult, list[str]]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with RolloutClient.for_run(run.path, patience_s=PATIENCE_S) as client:
                await client.submit_batch(spec)
                (run.path / "accepted").touch()
                result = await client.wait_batch(spec.batch_id)
                return result, [n.result.rollout_id async for n in client.stream(follow=False, trajectories=False)]
        except ServiceError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


def main() -> None:
    run = RunDirectory.open(Path(sys.argv[1]))
    rows = [{"gate": gate} for gate in range(int(sys.argv[2])) for _ in range(4)]
    spec = BatchSpec("b", run.load_config().task.name, rows, len(rows), 4, filter=GroupFilter.ALL)
    result, streamed = asyncio.run(ordered(run, spec))
    statuses = {r.rollout_id: r.status for group in result.groups for r in group.rollouts}
    (run.path / "ordered.json").write_text(json.dumps({"statuses": statuses, "streamed": streamed}))


if __name__ == "__main__":
    main()
