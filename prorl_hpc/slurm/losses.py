"""What the loss of nodes means for those that remain."""

from __future__ import annotations

from collections.abc import Collection

from prorl_hpc.slurm.plan import Plan, ProcessPlan


def what_a_loss_means(plan: Plan, lost: Collection[int]) -> str:
    """Why the attempt cannot go on without the nodes ``lost`` (ranks in the plan), for people; empty if it can.

    Workers and LLM servers can be replaced by others of their kind; the coordinator and every trainer rank cannot.
    An LLM server that is spread over several nodes is lost with any of them.
    """
    gone = [process for rank in lost for process in plan.nodes[rank].processes]
    for role, what in (("coordinator", "the coordinator ran there"), ("trainer", "training needs all its ranks")):
        if _of(gone, role):
            return what
    workers = _of(plan.processes, "worker")
    if workers and len(_of(gone, "worker")) == len(workers):
        return "no worker is left"
    servers = {process.index for process in _of(plan.processes, "inference")}
    if servers and servers == {process.index for process in _of(gone, "inference")}:
        return "no LLM server is left"
    return ""


def _of(processes: list[ProcessPlan], role: str) -> list[ProcessPlan]:
    return [process for process in processes if process.role == role]
