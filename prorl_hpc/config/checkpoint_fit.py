"""Whether a run's newest checkpoint fits its settings: its optimizer state is cut up by ranks and ZeRO stage, in one dtype, and with
``trainer.advantage=gae`` there is a value head beside it. Told by ``resume``, before anything is submitted or loaded; the
trainer looks at what really came to be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from prorl_hpc.config.schema import ComponentConfig, ProrlConfig

_STATE = "trainer_state"


def newest_first(checkpoints: Path) -> list[Path]:
    """What has the name of a checkpoint."""
    found = {int(number): path for path in checkpoints.glob("step-*") if (number := path.name[5:]).isdigit()}
    return [found[number] for number in sorted(found, reverse=True)]


def fit_problems(config: ProrlConfig, checkpoints: Path) -> Iterator[str]:
    """Each as a sentence that names the setting that goes back. Nothing where there is no checkpoint yet."""
    if not config.trainer.enabled:
        return
    for path in newest_first(checkpoints):
        try:
            state = json.loads((path / _STATE / "state.json").read_text())
            found = [*_ranks(config, state), *_stage(config, state), *_dtype(config, state), *_value_head(config, path)]
        except (OSError, ValueError, KeyError, BadZipFile):
            continue  # damaged: the trainer tells of it, and takes the one before
        for wrong, back in found:
            yield (
                f"{wrong}, from which the run goes on (checkpoint {path}): leave that change out, or go on with {back}. To train "
                f"its weights otherwise, begin a new run: `prorl-hpc launch … model=path model.path={path}`"
            )
        return


def _ranks(config: ProrlConfig, state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    saved, per_node = int(state["world"]), config.trainer.ranks_per_node
    slurm = config.cluster.kind == "slurm"
    nodes = _trainers_nodes(config).nodes if slurm else 1
    if nodes < 1 or per_node < 1 or nodes * per_node == saved:  # of less than one, the validation tells
        return
    back = [f"trainer.ranks_per_node={saved // nodes}"] if saved % nodes == 0 else []
    if slurm and saved % per_node == 0:
        back.append(f"cluster.{_trainers_component(config)}.nodes={saved // per_node}")
    back = back or [f"trainer.ranks_per_node and nodes that come to {saved}"]
    given = f"trainer.ranks_per_node={per_node}"
    given += f" on cluster.{_trainers_component(config)}.nodes={nodes}" if slurm else ""
    yield f"{given}: {nodes * per_node} trainer rank(s) do not fit the optimizer state of {saved}", " or ".join(back)


def _trainers_component(config: ProrlConfig) -> str:
    """On whose nodes the trainer runs; of a circle, the validation tells."""
    name = "trainer"
    for _ in range(3):
        component: ComponentConfig = getattr(config.cluster, name, config.cluster.trainer)
        name = component.same_nodes_as or name
    return name if hasattr(config.cluster, name) else "trainer"


def _trainers_nodes(config: ProrlConfig) -> ComponentConfig:
    component: ComponentConfig = getattr(config.cluster, _trainers_component(config))
    return component


def _stage(config: ProrlConfig, state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    saved, given = int(state["zero_stage"]), config.trainer.zero_stage
    if given != saved:
        yield (
            f"trainer.zero_stage={given} does not fit the optimizer state of ZeRO stage {saved}",
            f"trainer.zero_stage={saved}",
        )


def _dtype(config: ProrlConfig, state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What auto comes to is only known here where the trainer asks Slurm for GPUs."""
    saved, given = str(state["dtype"]).removeprefix("torch."), config.trainer.dtype
    on_gpus = config.cluster.kind == "slurm" and _trainers_nodes(config).gpus > 0
    told, comes_to = f"trainer.dtype={given}", given
    if given == "auto":
        told, comes_to = "trainer.dtype=auto, which is bfloat16 on GPUs,", "bfloat16" if on_gpus else saved
    if comes_to != saved:
        yield f"{told} does not fit the optimizer state in {saved}", f"trainer.dtype={saved}"


def _value_head(config: ProrlConfig, path: Path) -> Iterator[tuple[str, str]]:
    wanted, given = config.trainer.advantage == "gae", config.trainer.advantage
    file = path / _STATE / "extra.pt"
    if wanted != (file.exists() and _holds_tensors(file)):
        other = "trainer.advantage=group or another that has none" if wanted else "trainer.advantage=gae"
        lacks = "needs a value head, which is not in" if wanted else "has no value head, and there is one in"
        yield f"trainer.advantage={given} {lacks} what was saved", other


def _holds_tensors(file: Path) -> bool:
    """Whether a file of torch's, a zip with each tensor under ``…/data/``, has any."""
    with ZipFile(file) as archive:
        return any("/data/" in name for name in archive.namelist())
