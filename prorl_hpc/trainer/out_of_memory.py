"""What to say when memory runs out: the settings that take less of it, with what they are now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from prorl_hpc.config.schema import TrainerConfig
from prorl_hpc.messages.errors import RunError


@contextmanager
def explained(config: TrainerConfig, doing: str) -> Iterator[None]:
    """Turns an out-of-memory error, of a GPU or of the machine, into a RunError that names the way out. ``doing`` ends the
    sentence "the trainer ran out of memory …"."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"the trainer ran out of memory {doing}: {_first_line(error)}. {_way_out(config)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a type of its own for GPUs only; the allocator of a CPU raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")


def _way_out(config: TrainerConfig) -> str:
    ways = [f"trainer.micro_batch_tokens={config.micro_batch_tokens} can be lowered, down to the longest row"]
    if not config.gradient_checkpointing:
        ways.append("trainer.gradient_checkpointing=false can be true (layers are computed twice, not kept)")
    if config.zero_stage < 3:
        ways.append(
            f"trainer.zero_stage={config.zero_stage} can be up to 3 (state is shared out over the ranks; once there is a checkpoint "
            "only in a new run from it, model=path model.path=…/checkpoints/step-N)"
        )
    if config.offload != "all":
        ways.append(
            f"trainer.offload={config.offload} can be optimizer or, with zero_stage=3, all (state lies in the CPU's memory)"
        )
    ways.append("task.max_turn_tokens and task.max_rollout_tokens keep rows shorter")
    return "What takes less: " + "; ".join(ways)
