"""/v1/rollouts: single rollouts, and those that batches started."""

from __future__ import annotations

from prorl_hpc.messages.rollout import RolloutProgress, RolloutResult, RolloutSpec
from prorl_hpc.service.calls import Asked, Call
from prorl_hpc.service.limits import check_policy, check_rollouts, check_task
from prorl_hpc.service.parameters import AFTER, BATCH_ID, PAGE_LIMIT, POLICY, STATUS, WAIT_S, Query
from prorl_hpc.service.protocol import RolloutService

PATH = "/v1/rollouts"


def rollout_calls(service: RolloutService) -> list[Call]:
    async def submit(asked: Asked) -> list[RolloutProgress]:
        specs: list[RolloutSpec] = asked.body
        check_rollouts(specs)
        for i, spec in enumerate(specs):
            check_task(spec.task, service.tasks, f"$[{i}].task")
            check_policy(spec.policy, service.policies, f"$[{i}].policy", or_any=True)
        return await service.submit_rollouts(specs)

    def _policy(query: Query) -> str:
        policy = query.get(POLICY)
        if policy:
            check_policy(policy, service.policies, POLICY.name, status=404)
        return policy

    async def page(asked: Asked) -> list[RolloutProgress]:
        query = asked.query
        return await service.list_rollouts(
            query.get(STATUS), query.get(BATCH_ID), _policy(query), query.get(AFTER), query.get(PAGE_LIMIT)
        )

    async def progress(asked: Asked) -> RolloutProgress:
        return await service.rollout_progress(asked.id)

    async def result(asked: Asked) -> RolloutResult | RolloutProgress:
        return await service.wait_rollout(asked.id, asked.query.get(WAIT_S))

    async def cancel(asked: Asked) -> RolloutProgress:
        return await service.cancel_rollout(asked.id)

    one = f"{PATH}/{{id}}"
    many = list[RolloutProgress]
    return [
        Call("POST", PATH, "Order single rollouts", submit, many, list[RolloutSpec], refusals=(409, 429, 503)),
        Call(
            "GET", PATH, "All rollouts, those under way first", page, many,
            params=(STATUS, BATCH_ID, POLICY, AFTER, PAGE_LIMIT), refusals=(404,),
        ),
        Call("GET", one, "Where a rollout stands", progress, RolloutProgress, refusals=(404,)),
        Call("DELETE", one, "Cancel a rollout", cancel, RolloutProgress, refusals=(404, 409)),
        Call(
            "GET", f"{one}/result", "How a rollout ended", result, RolloutResult,
            pending=RolloutProgress, params=(WAIT_S,), refusals=(404, 410, 503),
        ),
    ]  # fmt: skip
