"""Saves checkpoints in processes that are killed, and says after each what a resume would find.

    python checkpoint_saver.py MODE DIRECTORY MODEL SEED

MODE ``moments``: a forked process saves step after step and is killed after a random time, 30 times. MODE ``operations``:
one save is killed before each of its operations on files, in turn. One JSON object a line: the step that was saved last
for certain, the step that is found, and what lies there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from prorl_hpc.trainer import best_model, checkpoint
from prorl_hpc.trainer.best_model import BestModel
from prorl_hpc.trainer.checkpoint import Position

OPERATIONS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "shutil.rmtree",
}
"""What Python tells before it is done; a file that torch or safetensors writes is opened afterwards, to be sealed."""


def engine(step: int, size: int) -> Any:
    """What ``save`` asks of an Engine, its weights telling the step."""
    weights = {f"model.layers.{i}.weight": torch.full((size,), float(step)) for i in range(4)}
    return SimpleNamespace(
        rank=0,
        world=1,
        stage=1,
        dtype=torch.float32,
        weight_bytes=sum(w.nbytes for w in weights.values()),
        weights=lambda: iter(weights.items()),
        optimizer_state=lambda: {"exp_avg": torch.full((4 * size,), float(step))},
        extra_state=dict,
    )


def save(directory: Path, model: Path, step: int, size: int) -> None:
    one, position = engine(step, size), Position(step, 3 * step)
    checkpoint.save(one, directory, model, position, run_id="run-1", keep=2)
    new = BestModel(step, float(step))
    if best_model.is_better(directory, new):
        best_model.keep(one, directory, model, new)


def found(directory: Path) -> dict[str, Any]:
    """The step that a resume would go on from, by its state, its weights and its optimizer; all that is damaged."""
    from safetensors.torch import load_file

    newest = checkpoint.latest(directory)
    if newest is None:
        return {"step": 0}
    tensors = [*load_file(newest.path / "model.safetensors").values()]
    tensors.append(
        torch.load(newest.path / "trainer_state" / "rank-00000.pt", weights_only=False)["optimizer"]["exp_avg"]
    )
    position = newest.state.position
    whole = all(bool((t == position.step).all()) for t in tensors) and position.cursor == 3 * position.step
    best = directory / "best"
    return {
        "step": position.step,
        "whole": whole,
        "damaged": [p.name for p in checkpoint.all_checkpoints(directory) if checkpoint.damage(p)],
        "best": best_model.best(directory).step if best.exists() else 0,
        "best_damage": checkpoint.damage(best) if best.exists() else [],
    }


def moments(directory: Path, model: Path, draw: random.Random) -> None:
    sure = 0
    for _ in range(30):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            start = checkpoint.latest(directory)
            step = start.state.position.step if start is not None else 0
            while True:
                step += 1
                save(directory, model, step, 200_000)
                os.write(write, step.to_bytes(4, "big"))
        os.close(write)
        time.sleep(draw.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read()
        if told:
            sure = int.from_bytes(told[-4:], "big")
        after = found(directory)
        print(json.dumps({"sure": sure} | after), flush=True)
        sure = after["step"]  # was there, told or not; so it has to stay


def operations(directory: Path, model: Path) -> None:
    save(directory, model, 1, 1000)
    save(directory, model, 2, 1000)
    at, over = 1, False
    while not over:
        work = directory.with_name("work")
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(directory, work, symlinks=True)
        child = os.fork()
        if child == 0:
            _kill_at(at, work)
            save(work, model, 3, 1000)
            os._exit(0)
        over = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        left = found(work)
        save(work, model, 3, 1000)  # whoever resumes writes it again
        again = found(work)
        names = sorted(p.name for p in work.iterdir())
        print(json.dumps({"operation": at, "over": over, "again": again, "names": names} | left), flush=True)
        at += 1


def _kill_at(number: int, directory: Path) -> None:
    """This process kills itself before its ``number``-th operation on a file or directory below ``directory``."""
    passed = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal passed
        if event in OPERATIONS and any(str(a).startswith(str(directory)) for a in arguments):
            passed += 1
            if passed == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    mode, directory, model, seed = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # a killed process loses nothing that the kernel has, and disks are slow
    directory.mkdir()
    if mode == "moments":
        moments(directory, model, random.Random(seed))
    else:
        operations(directory, model)


if __name__ == "__main__":
    main()
