"""The model with the best held-out reward: ``checkpoints/best`` links to it, a Hugging Face model directory.

It is another name for the files of the checkpoint of its step, where there is one; else they are written. It has no trainer
state: to go on from it is a new run, with ``model=path``. ``best.json`` in it says which step it is of, and what its reward
was measured on: after a change of that the best is looked for anew. The link is changed in one
move, so it always leads to a whole model.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import msgspec

from prorl_hpc.messages.codec import read_json
from prorl_hpc.trainer.checkpoint import STATE_DIRECTORY, step_directory
from prorl_hpc.trainer.checkpoint_files import Writing, remove, write_model
from prorl_hpc.trainer.engine import Engine
from prorl_hpc.trainer.heldout_set import HeldOutSet
from prorl_hpc.trainer.manifest import MANIFEST, read_manifest
from prorl_hpc.trainer.removing import clear_away, discard

log = logging.getLogger(__name__)

LINK = "best"
_RECORD = "best.json"


class BestModel(msgspec.Struct, frozen=True):
    """``reward``: mean over the held-out rollouts after ``step``, which were those of ``held_out``."""

    step: int
    reward: float
    held_out: HeldOutSet = HeldOutSet()


def best(checkpoints: Path) -> BestModel | None:
    """What is kept; None if nothing is, or nobody can tell what."""
    record = checkpoints / LINK / _RECORD
    try:
        return read_json(record, BestModel)
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be read (%s): the best model is looked for anew", record, error)
        return None


def is_better(checkpoints: Path, new: BestModel) -> bool:
    """Than what is kept, or measured on something else. Not step 0: that model is there already, as ``model.path``."""
    kept = best(checkpoints)
    if new.step == 0 or kept is None:
        return new.step > 0
    if kept.held_out != new.held_out:
        log.info(
            "checkpoints/%s was chosen by other held-out rollouts (%s; now %s), so its reward cannot be compared: the best "
            "model is looked for anew",
            LINK,
            kept.held_out,
            new.held_out,
        )
        return True
    return new.reward > kept.reward


def keep(engine: Engine, checkpoints: Path, model_directory: Path, new: BestModel) -> None:
    """Collective: make ``checkpoints/best`` the model that the engine holds. Raises CheckpointNotWritten; the one before is kept
    then."""
    # A step that was trained again may earn another reward.
    name = f".best-{new.step}-{new.reward!r}-{new.held_out.digest}"
    with Writing(engine, checkpoints, name) as writing:
        if not writing.there:
            _write(writing, step_directory(checkpoints, new.step), model_directory, new)
        writing.together(lambda: _link(checkpoints, name) if writing.lead else None)
        if writing.lead:
            log.info("checkpoints/%s is the model of step %d: held-out reward %.3f", LINK, new.step, new.reward)


def _write(writing: Writing, same_step: Path, model_directory: Path, new: BestModel) -> None:
    linked = writing.from_lead(_can_link(same_step))
    writing.begin(0 if linked else writing.engine.weight_bytes, [])
    if linked:
        writing.together(lambda: _link_files(writing, same_step))
    else:
        writing.together(lambda: write_model(writing, model_directory))
    writing.together(lambda: writing.json(_RECORD, new) if writing.lead else None)
    writing.finish()


def _can_link(checkpoint: Path) -> bool:
    return not isinstance(read_manifest(checkpoint), str)


def _link_files(writing: Writing, checkpoint: Path) -> None:
    """The model's files under a second name; copies where the file system has no hard links."""
    if not writing.lead:
        return
    for file in checkpoint.iterdir():
        if file.name in (STATE_DIRECTORY, MANIFEST) or not file.is_file():
            continue
        try:
            os.link(file, writing.aside / file.name)
        except OSError:
            shutil.copyfile(file, writing.aside / file.name)
        writing.seal(writing.aside / file.name)


def _link(checkpoints: Path, name: str) -> None:
    link, aside = checkpoints / LINK, checkpoints / f".{LINK}.new"
    discard(aside)
    aside.symlink_to(name)
    if link.is_dir() and not link.is_symlink():  # a copy that followed the link
        remove(link)
    aside.replace(link)
    for older in checkpoints.glob(".best-*"):
        if older.name != name:
            clear_away(older)
