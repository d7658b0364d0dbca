"""One of several ranks, run as a process by test_trainer_gradients: one step, then its gradients into a file.

python trainer_rank.py MODEL STATE_DIRECTORY RANK WORLD STAGE OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from trainer_samples import training_samples

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.trainer.engine import Engine, prepare_deepspeed
from prorl_hpc.trainer.process_group import join
from prorl_hpc.trainer.stopping import StopSignal


def first_moments(engine: Engine) -> dict[str, torch.Tensor]:
    """Adam's exp_avg after the first step: 0.1 × the gradient."""
    from deepspeed.utils import safe_get_full_optimizer_state

    plain = engine._deepspeed.optimizer
    found = {}
    for name, parameter in engine.policy.lm.named_parameters():
        if engine.stage == 0:
            found[name] = plain.state[parameter]["exp_avg"].clone()
        else:
            found[name] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
    return found


def main() -> None:
    model, state, rank, world, stage, output = sys.argv[1:]
    commands = join(
        Path(state), rank=int(rank), world=int(world), local_rank=int(rank), host="127.0.0.1", timeout_s=120
    )
    prepare_deepspeed()
    config = TrainerConfig(
        threads=1, zero_stage=int(stage), max_grad_norm=1e9, micro_batch_tokens=40, adam_betas=[0.9, 0.95]
    )
    engine = Engine(model, config, StopSignal(), world=int(world), commands=commands)
    outcome = engine.train(training_samples(), 1e-3)
    moments = first_moments(engine)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    if rank == "0":
        torch.save({"moments": moments, "metrics": outcome.metrics, "weights": weights}, output)


if __name__ == "__main__":
    main()
