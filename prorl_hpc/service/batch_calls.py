"""/v1/batches: groups of samples, filtered as DAPO wants them."""

from __future__ import annotations

from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.service.calls import Asked, Call
from prorl_hpc.service.limits import check_batch, check_policy, check_task
from prorl_hpc.service.parameters import AFTER, PAGE_LIMIT, WAIT_S
from prorl_hpc.service.protocol import RolloutService

PATH = "/v1/batches"


def batch_calls(service: RolloutService) -> list[Call]:
    async def submit(asked: Asked) -> BatchProgress:
        spec: BatchSpec = asked.body
        check_batch(spec)
        check_task(spec.task, service.tasks, "$.task")
        check_policy(spec.policy, service.policies, "$.policy", or_any=True)
        return await service.submit_batch(spec)

    async def page(asked: Asked) -> list[BatchProgress]:
        return await service.list_batches(asked.query.get(AFTER), asked.query.get(PAGE_LIMIT))

    async def progress(asked: Asked) -> BatchProgress:
        return await service.batch_progress(asked.id)

    async def result(asked: Asked) -> BatchResult | BatchProgress:
        return await service.wait_batch(asked.id, asked.query.get(WAIT_S))

    async def cancel(asked: Asked) -> BatchProgress:
        return await service.cancel_batch(asked.id)

    one = f"{PATH}/{{id}}"
    return [
        Call("POST", PATH, "Order a batch of groups", submit, BatchProgress, BatchSpec, refusals=(409, 429, 503)),
        Call("GET", PATH, "All batches", page, list[BatchProgress], params=(AFTER, PAGE_LIMIT), refusals=(404,)),
        Call("GET", one, "How far a batch is", progress, BatchProgress, refusals=(404,)),
        Call("DELETE", one, "Cancel a batch", cancel, BatchProgress, refusals=(404, 409)),
        Call(
            "GET", f"{one}/result", "A batch's groups", result, BatchResult,
            pending=BatchProgress, params=(WAIT_S,), refusals=(404, 410, 503),
        ),
    ]  # fmt: skip
