"""``python -m prorl_hpc.trainer`` with a fake rollout service and toy rows in place of the real ones.

    python trainer_process.py MODE --run-dir … --name trainer-0 --rank 0 --world 1

MODE ``whole``: to the end. ``hang-N``: the rollouts of step N never end (``hang-N`` is written to the run's state).
``ids``, ``memory``: step 1 has a token id that no model knows, or no memory for its loss. Batches that were asked for are listed in the run's state, ``asked``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

import prorl_hpc.service.client
import prorl_hpc.tasks.dataset
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.status import Phase, ProcessState
from prorl_hpc.observe.process import Process


class Client:
    """Stands in for RolloutClient; FakeRollouts is made late, since it loads torch."""

    mode = "whole"

    @classmethod
    def for_run(cls, process: Process, *, patience_s: float):
        from fake_rollouts import FakeRollouts

        class Service(FakeRollouts):
            async def wait_batch(self, batch_id):
                if self.mode == f"hang-{batch_id.removeprefix('step-')}":
                    (process.run.state / self.mode).touch()
                    await asyncio.Event().wait()
                with (process.run.state / "asked").open("a") as asked:
                    asked.write(f"{batch_id}\n")
                result = await super().wait_batch(batch_id)
                if batch_id == "step-1":
                    (process.run.state / "training").touch()
                    return spoiled(result, self.mode)
                return result

        service = Service(
            Path(process.config.model.path),
            turn_tokens=process.config.task.max_turn_tokens,
            secret=process.run.weight_secret_file,
        )
        service.mode = cls.mode
        return service


def spoiled(result, mode):
    """The batch with the fault ``mode``."""
    if mode == "memory":
        prorl_hpc.trainer.engine.training_loss = no_memory
    if mode != "ids":
        return result
    group, *others = result.groups
    first, *rest = group.rollouts
    prompt, written = first.trajectory.segments
    written = msgspec.structs.replace(written, token_ids=[*written.token_ids[:-1], 10**6])
    first = msgspec.structs.replace(
        first, trajectory=msgspec.structs.replace(first.trajectory, segments=[prompt, written])
    )
    return msgspec.structs.replace(result, groups=[msgspec.structs.replace(group, rollouts=[first, *rest]), *others])


def no_memory(*inputs):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000000000000 bytes.")


def rows(task, split):
    return [{"id": f"{split}-{i}", "number": i} for i in range(16)]


def main() -> None:
    Client.mode = sys.argv.pop(1)
    prorl_hpc.service.client.RolloutClient = Client
    prorl_hpc.tasks.dataset.load_rows = rows
    run = RunDirectory(sys.argv[sys.argv.index("--run-dir") + 1])
    state = ProcessState("coordinator", "coordinator", "here", 1, Phase.READY)
    write_json(run.process_state("coordinator"), state)
    from prorl_hpc.observe.process import exit_at_once
    from prorl_hpc.trainer.__main__ import main as trainer

    exit_at_once(trainer())


if __name__ == "__main__":
    main()
