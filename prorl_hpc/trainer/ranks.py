"""Which rank a process is. In a run the supervisors say it on the command line; ranks that ``srun`` starts itself ask Slurm.

srun --ntasks=8 --ntasks-per-node=4 python -m prorl_hpc.trainer --run-dir DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prorl_hpc.messages.errors import RunError


def with_slurm_rank(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line with ``--rank``, ``--world`` and ``--name`` added from Slurm's variables, where the first two are not given and Slurm
    started this process. Supervisors give both, and hide Slurm's variables."""
    given = {word.partition("=")[0] for word in words}
    # Of the tasks that srun starts only: a batch script has SLURM_PROCID and SLURM_NTASKS too, and is alone.
    if "SLURM_STEP_NUM_TASKS" not in environ or given & {"--rank", "--world"}:
        return list(words)
    rank = environ["SLURM_PROCID"]
    added = ["--rank", rank, "--world", environ["SLURM_STEP_NUM_TASKS"]]
    return [*words, *added, *([] if "--name" in given else ["--name", f"trainer-{rank}"])]


def local_rank(rank: int, ranks_per_node: int, environ: Mapping[str, str]) -> int:
    """Number of the rank on its node."""
    return int(environ["SLURM_LOCALID"]) if "SLURM_LOCALID" in environ else rank % ranks_per_node


def own_gpu(local: int, visible: int) -> int:
    """Which of the ``visible`` GPUs is that of the rank with this number on its node: they are all of the node's, or, under
    ``srun --gpus-per-task=1``, its own alone. Raises RunError if there is none for it."""
    if visible == 1:
        return 0
    if local >= visible:
        raise RunError(
            f"there is no GPU for rank {local} of this node, which sees {visible}: a rank needs one of its own "
            "(srun --gpus-per-task=1, or fewer --ntasks-per-node)"
        )
    return local


def on_one_node(planned: bool, environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this node: as ``planned``, unless Slurm says how many nodes its step has."""
    nodes = environ.get("SLURM_STEP_NUM_NODES")
    return planned if nodes is None else int(nodes) == 1
