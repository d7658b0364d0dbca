"""What the loss of nodes means for those that remain."""

from __future__ import annotations

from collections.abc import Collection

from prorl_hpc.slurm.plan import Plan, ProcessPlan


def what_a_loss_means(plan: Plan, lost: Collection[int]) -> str:
    """Why the attempt cannot go on without the nodes ``lost`` (ranks in the plan), for people; empty if it can.

    Workers and LLM servers can be replaced by others of their kind; the coordinator and every trainer rank cannot.
    """
    gone = [process for rank in lost for process in plan.nodes[rank].processes]
    for role, what in (("coordinator", "the coordinator ran there"), ("trainer", "training needs all its ranks")):
        if _of(gone, role):
            return what
    for role, what in (("worker", "no worker is left"), ("inference", "no LLM server is left")):
        if _of(gone, role) and len(_of(gone, role)) == len(_of(plan.processes, role)):
            return what
    return ""


def _of(processes: list[ProcessPlan], role: str) -> list[ProcessPlan]:
    return [process for process in processes if process.role == role]
