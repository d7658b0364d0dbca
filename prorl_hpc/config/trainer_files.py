"""What the trainer's settings name on disk: a reference model, a DeepSpeed JSON of one's own; and whether the model fits the
checkpoint that a run goes on from. Looked at by launch and resume, and by the trainer on its own node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.config.checkpoint_fit import newest_first
from prorl_hpc.config.deepspeed_json import deepspeed_problems
from prorl_hpc.config.model_directory import check_network, hub_hint, prepared_model, vocab_size_of, vocabulary_of
from prorl_hpc.config.schema import ProrlConfig


def trainer_problems(config: ProrlConfig) -> Iterator[str]:
    """Each as a sentence with its cure. Nothing where no trainer runs."""
    if not config.trainer.enabled:
        return
    yield from deepspeed_problems(config.trainer)
    if config.trainer.kl_model and config.trainer.kl_coefficient > 0:  # of the latter, the validation tells
        trained = _trained(config)
        try:
            _check_reference(Path(config.trainer.kl_model).expanduser(), trained)
        except ValueError as error:
            yield str(error)


def checkpoint_problems(config: ProrlConfig, checkpoints: Path) -> Iterator[str]:
    """LLM servers load ``model.path``, the trainer goes on from the newest checkpoint: they must mean the same by an id."""
    if not config.trainer.enabled:
        return
    trained = _trained(config)
    for saved in newest_first(checkpoints):
        try:
            difference = _difference(saved, trained)
        except ValueError:
            continue  # a damaged checkpoint, of which the trainer tells, or no model: what looks at models tells
        if difference:
            yield (
                f"model.path={trained}, which the LLM servers load, has another vocabulary than {saved}, which the trainer "
                f"goes on from: {difference}. Give the model that the run began with, or begin a new run with it"
            )
        return


def _trained(config: ProrlConfig) -> Path:
    model = config.model
    return Path(model.path).expanduser().absolute() if model.path else prepared_model(model.prepare)


def _check_reference(directory: Path, trained: Path) -> None:
    """ValueError unless its logprob of a token can be compared with that of the trained model, if that is there yet."""
    if not directory.is_dir():
        raise ValueError(
            f"trainer.kl_model={directory} is not a directory: give a Hugging Face model directory, or leave it empty for the "
            f"model that training begins with{hub_hint('trainer.kl_model', str(directory))}"
        )
    try:
        config = check_network(directory)
        if not (trained / "tokenizer.json").is_file():
            return  # told by what looks at the model itself, or it is yet to be made: then the trainer compares
        difference = _difference(directory, trained)
    except ValueError as error:
        raise ValueError(f"trainer.kl_model: {error}") from error
    if difference:
        raise ValueError(
            f"trainer.kl_model={directory} has another vocabulary than {trained}: {difference}. The KL divergence compares "
            "probabilities of the same ids: take a model with the same tokenizer, or leave trainer.kl_model empty"
        )
    size, known = vocab_size_of(config), vocab_size_of(check_network(trained))
    if None not in (size, known) and size != known:
        raise ValueError(
            f"trainer.kl_model={directory} has vocab_size {size} in its config.json, {trained} has {known}: take a model with "
            "the same vocabulary, or leave trainer.kl_model empty"
        )


def _difference(one: Path, other: Path) -> str:
    """Of two models' tokenizers, in words; empty if there is none. ValueError if one cannot be read."""
    first, second = vocabulary_of(one), vocabulary_of(other)
    differing = [token for token in second if first.get(token) != second[token]]
    differing += first.keys() - second.keys()
    if not differing:
        return ""
    return f"{len(first)} and {len(second)} tokens, {differing[0]!r} is one that differs"
