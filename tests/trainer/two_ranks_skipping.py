"""One of two ranks, run as a process by test_skipped_updates: rank 1 alone has a loss that is not finite.

python two_ranks_skipping.py MODEL STATE_DIRECTORY RANK
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from trainer_samples import training_samples

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.trainer import engine as engine_module
from prorl_hpc.trainer.engine import Engine, prepare_deepspeed
from prorl_hpc.trainer.process_group import join
from prorl_hpc.trainer.stopping import StopSignal


def main() -> None:
    model, state, rank = sys.argv[1:]
    commands = join(Path(state), rank=int(rank), world=2, local_rank=int(rank), host="127.0.0.1", timeout_s=120)
    prepare_deepspeed()
    whole = engine_module.training_loss

    def spoilt(*arguments):
        loss, sums = whole(*arguments)
        sums.loss = math.nan
        return loss, sums

    for stage in (0, 1, 2, 3):
        config = TrainerConfig(zero_stage=stage, threads=1, dtype="float32", micro_batch_tokens=60)
        engine = Engine(model, config, StopSignal(), world=2, commands=commands)
        before = {name: tensor.clone() for name, tensor in engine.weights()}
        engine_module.training_loss = spoilt if rank == "1" else whole
        metrics = engine.train(training_samples(settings=config), 1e-3).metrics
        assert (metrics["updates_skipped"], metrics["optimizer_steps"]) == (1, 0), metrics
        now = {name: tensor.clone() for name, tensor in engine.weights()}
        torch.testing.assert_close(now, before, rtol=0, atol=0)
        engine_module.training_loss = whole
        metrics = engine.train(training_samples(settings=config), 1e-3).metrics
        assert (metrics["updates_skipped"], metrics["optimizer_steps"]) == (0, 1), metrics
    # A rank that leaves while the other still reads from it would reset the connection.
    dist.barrier(group=commands)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
