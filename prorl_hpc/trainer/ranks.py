"""Which rank a process is. In a run the supervisors say it on the command line; ranks that ``srun`` starts itself ask Slurm.

srun --ntasks=8 --ntasks-per-node=4 python -m prorl_hpc.trainer --run-dir DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def with_slurm_rank(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line with ``--rank``, ``--world`` and ``--name`` added from Slurm's variables, where the first two are not given and Slurm
    started this process. Supervisors give both, and hide Slurm's variables."""
    given = {word.partition("=")[0] for word in words}
    if "SLURM_PROCID" not in environ or given & {"--rank", "--world"}:
        return list(words)
    rank = environ["SLURM_PROCID"]
    added = ["--rank", rank, "--world", environ.get("SLURM_NTASKS", "1")]
    return [*words, *added, *([] if "--name" in given else ["--name", f"trainer-{rank}"])]


def local_rank(rank: int, ranks_per_node: int, environ: Mapping[str, str]) -> int:
    """Number of the rank on its node, which is that of its GPU."""
    return int(environ["SLURM_LOCALID"]) if "SLURM_LOCALID" in environ else rank % ranks_per_node


def on_one_node(planned: bool, environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this node: as ``planned``, unless Slurm says how many nodes its step has."""
    nodes = environ.get("SLURM_STEP_NUM_NODES")
    return planned if nodes is None else int(nodes) == 1
