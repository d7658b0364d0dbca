"""Checkpoints that transformers loads, vLLM serves and a run resumes from.

``checkpoints/step-N/`` is a Hugging Face model directory; ``trainer_state/`` in it holds the rest: optimizer and what
else the engine has of its own, random states, step and data cursor, and whose it is. Rollouts and groups under way are in
the rollout service's journal, by the names of the batches, which follow from the step and the cursor.

A checkpoint is written under another name and renamed when it is whole and on disk: neither a kill nor a node that fails
leaves half of one. What a disk does to it afterwards, ``manifest.json`` shows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from time import monotonic as clock
from typing import Any

import msgspec
import torch

from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.checkpoint_files import Writing, damaged_name, remove, write_model
from prorl_hpc.trainer.engine import Engine
from prorl_hpc.trainer.manifest import damage, lacking
from prorl_hpc.trainer.random_state import random_state, set_random_state
from prorl_hpc.trainer.removing import discard

log = logging.getLogger(__name__)

STATE_DIRECTORY = "trainer_state"
STATE_FILE, EXTRA_FILE = f"{STATE_DIRECTORY}/state.json", f"{STATE_DIRECTORY}/extra.pt"


class Position(msgspec.Struct, frozen=True):
    """Where training stands: ``step`` optimizer steps done, ``cursor`` rows of the endless shuffled data used up."""

    step: int = 0
    cursor: int = 0


class SavedState(msgspec.Struct, frozen=True):
    """``trainer_state/state.json``: whose it is, where it stands, and what its optimizer files fit to.
    ``weight_version``: of the weights, as the servers are told it. ``line``: of the step in metrics.jsonl, for whoever resumes
    if a kill came before it was written there; None if it was."""

    run_id: str
    position: Position
    weight_version: int
    world: int
    zero_stage: int
    dtype: str
    line: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: SavedState


def step_directory(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def all_checkpoints(checkpoints: Path) -> list[Path]:
    """What has the name of a checkpoint, oldest first."""
    found = [p for p in checkpoints.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


# --- choose ---


def latest(checkpoints: Path) -> Checkpoint | None:
    """The newest checkpoint that is as it was written, or None."""
    for path in reversed(all_checkpoints(checkpoints)):
        if isinstance(state := _examined(path), SavedState):
            return Checkpoint(path, state)
    return None


def choose(checkpoints: Path, run_id: str) -> Checkpoint | None:
    """The newest checkpoint that this run can go on from; None if it has none yet. A damaged one that is newer is told
    and set aside as ``step-N.damaged``. Raises RunError if it is another run's, or if all are damaged."""
    damaged: list[str] = []
    began = clock()
    for path in reversed(all_checkpoints(checkpoints)):
        state = _examined(path)
        if isinstance(state, SavedState):
            _check_run(path, state, run_id)
            _set_aside(checkpoints, path, damaged)
            log.info(
                "going on from %s: every file is as its manifest says (looked at in %.1f s)", path, clock() - began
            )
            return Checkpoint(path, state)
        damaged += state
    if damaged:
        raise RunError(
            f"no checkpoint in {checkpoints} is as it was written: {'; '.join(damaged)}. Bring the files back from a copy; or, "
            f"to begin again at step 0, move {checkpoints}/step-* away"
        )
    return None


def _examined(path: Path) -> SavedState | list[str]:
    """The state of a checkpoint that is whole and as it was written, else what is wrong with it."""
    if wrong := damage(path):
        return wrong
    file = path / STATE_FILE
    try:
        state = read_json(file, SavedState)
    except (OSError, msgspec.MsgspecError) as error:
        return [f"{file} cannot be read: {error}"]
    if state is None:
        return [f"{file} is not there: expected the state to resume from"]
    ranks = [_rank_file(rank) for rank in range(state.world)]
    return lacking(path, ["config.json", STATE_FILE, EXTRA_FILE, *ranks]) or state


def _rank_file(rank: int) -> str:
    return f"{STATE_DIRECTORY}/rank-{rank:05d}.pt"


def _check_run(path: Path, state: SavedState, run_id: str) -> None:
    if state.run_id != run_id:
        raise RunError(
            f"{path} was saved by the run {state.run_id}, and this is {run_id}: its rollouts and its place in the data are "
            f"another's. To go on with {state.run_id}, resume it in its own directory, under its own name; to start a run "
            f"from these weights, launch one with model=path model.path={path}"
        )


def _set_aside(checkpoints: Path, chosen: Path, damaged: list[str]) -> None:
    """Out of the way of the checkpoint that will be written in its place, for whoever wants to look at it."""
    for wrong in damaged:
        log.error("damaged: %s", wrong)
    for path in all_checkpoints(checkpoints):
        if path != chosen and int(path.name.removeprefix("step-")) > int(chosen.name.removeprefix("step-")):
            aside = damaged_name(path)
            discard(aside)
            path.rename(aside)
            log.error("%s is not as it was written: %s is used; the other is now %s", path, chosen, aside)


# --- save ---


def save(
    engine: Engine,
    checkpoints: Path,
    model_directory: Path,
    position: Position,
    *,
    run_id: str,
    keep: int,
    line: dict[str, Any] | None = None,
) -> Path:
    """Collective: write step-N, and remove all but the newest ``keep``, each of which can be resumed from. A step that is
    already saved is left alone. Raises CheckpointNotWritten, on all ranks; nothing has changed then."""
    final = step_directory(checkpoints, position.step)
    with Writing(engine, checkpoints, final.name) as writing:
        if not writing.there:
            _write(writing, model_directory, _state_of(engine, position, run_id, line))
    if engine.rank == 0:
        for path in all_checkpoints(checkpoints)[:-keep]:
            remove(path)
    return final


def _write(writing: Writing, model_directory: Path, state: SavedState) -> None:
    engine = writing.engine
    optimizer, extra = engine.optimizer_state(), engine.extra_state()
    writing.begin(engine.weight_bytes, [optimizer, extra], STATE_DIRECTORY)

    def states() -> None:
        own = {"optimizer": optimizer, "random": random_state()}
        writing.torch_save(own, _rank_file(engine.rank))
        if writing.lead:
            writing.torch_save(extra, EXTRA_FILE)
            writing.json(STATE_FILE, state)

    writing.together(states)
    writing.together(lambda: write_model(writing, model_directory))
    writing.finish()


def _state_of(engine: Engine, position: Position, run_id: str, line: dict[str, Any] | None) -> SavedState:
    # Version 0 is what an engine starts with, so the weights before step s + 1 are version s + 1.
    return SavedState(run_id, position, position.step + 1, engine.world, engine.stage, str(engine.dtype), line)


# --- restore ---


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Collective: load the optimizer and random states; the engine was made from the checkpoint's weights."""
    saved = checkpoint.state
    now = (engine.world, engine.stage, str(engine.dtype))
    if (saved.world, saved.zero_stage, saved.dtype) != now:
        raise RunError(
            f"{checkpoint.path} was saved by {saved.world} trainer rank(s) with ZeRO stage {saved.zero_stage} in {saved.dtype}, "
            f"this run has {engine.world}, stage {engine.stage} and {engine.dtype}: resume with the same settings, "
            f"or start a new run with model=path model.path={checkpoint.path}"
        )
    # weights_only=False: DeepSpeed's state holds objects of its own; the run directory is ours alone (0700).
    own = checkpoint.path / _rank_file(engine.rank)
    state: dict[str, Any] = torch.load(own, map_location="cpu", weights_only=False)
    engine.load_extra_state(torch.load(checkpoint.path / EXTRA_FILE, map_location="cpu", weights_only=True))
    engine.load_optimizer_state(state["optimizer"])
    set_random_state(state["random"])
