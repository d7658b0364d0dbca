"""Files that the trainer's settings name: the reference model and a DeepSpeed JSON of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.config.deepspeed_json import deepspeed_problems
from prorl_hpc.config.model_directory import check_reference_model, prepared_model
from prorl_hpc.config.schema import ProrlConfig


def trainer_problems(config: ProrlConfig) -> Iterator[str]:
    """Each as a sentence with its cure. Nothing where no trainer runs."""
    if not config.trainer.enabled:
        return
    yield from deepspeed_problems(config.trainer)
    yield from _reference_model(config)


def _reference_model(config: ProrlConfig) -> Iterator[str]:
    trainer, model = config.trainer, config.model
    if not trainer.kl_model or trainer.kl_coefficient <= 0:  # of the latter, the validation tells
        return
    trained = Path(model.path).expanduser().absolute() if model.path else prepared_model(model.prepare)
    if not (trained / "tokenizer.json").is_file():
        return  # told by what looks at the model itself, or not yet prepared: then the trainer compares
    try:
        check_reference_model(Path(trainer.kl_model).expanduser(), trained)
    except ValueError as error:
        yield str(error)
