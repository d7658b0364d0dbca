"""One of two ranks, run as a process by test_update_invariance: many steps, their momenta into a file.

python two_ranks.py MODEL REFERENCE STATE_DIRECTORY RANK OUTPUT PIECE:STAGE…
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from plain_step import LEARNING_RATE, SGD, config_of
from trainer_samples import training_samples

from prorl_hpc.trainer import policy
from prorl_hpc.trainer.engine import Engine, prepare_deepspeed
from prorl_hpc.trainer.process_group import join
from prorl_hpc.trainer.stopping import StopSignal

PARTED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
}
"""ZeRO-3 keeps small weights on every rank, and those that are used again soon; the tiny model has no others."""


def momenta(engine: Engine) -> dict[str, torch.Tensor]:
    """SGD's momentum of every weight."""
    from deepspeed.utils import safe_get_full_optimizer_state

    plain = engine._deepspeed.optimizer
    if engine.stage in (1, 2):
        # DeepSpeed looks for the states when the first group has stepped, and so misses those of the second.
        plain._hp_optimizer_states_linked = False
        plain._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.policy.named_parameters():
        if engine.stage == 0:
            momentum = plain.state[parameter]["momentum_buffer"]
        else:
            momentum = safe_get_full_optimizer_state(parameter, "momentum_buffer")
        found[name.removeprefix("lm.")] = momentum.clone()
    return found


def main() -> None:
    model, reference, state, rank, output, *steps = sys.argv[1:]
    commands = join(Path(state), rank=int(rank), world=2, local_rank=int(rank), host="127.0.0.1", timeout_s=120)
    prepare_deepspeed()
    policy.CHUNK_TOKENS = (
        16  # micro-batches have 15 to 18 trained tokens: one rank needs a chunk where the other needs two
    )
    results = {}
    for step in steps:
        piece, stage = step.split(":")
        own = SGD | ({"zero_optimization": PARTED} if stage == "3" else {})
        config = config_of(piece, micro_batch_tokens=40, zero_stage=int(stage), deepspeed=own)
        engine = Engine(model, config, StopSignal(), world=2, commands=commands, reference_path=reference)
        outcome = engine.train(training_samples(settings=config), LEARNING_RATE)
        results[step] = {"momenta": momenta(engine), "metrics": outcome.metrics, "extra": engine.extra_state()}
        results[step]["weights"] = [name for name, _ in engine.weights()]
    if rank == "0":
        torch.save(results, output)
    # A rank that leaves while the other still reads from it would reset the connection.
    dist.barrier(group=commands)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
