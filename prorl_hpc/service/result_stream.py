"""/v1/results: results as they get onto disk, a line of JSON each.

A reader goes on from the cursor of the last line that it has. Of the results no more than a page is held, and the next
page is not asked for before this one is sent: a slow reader slows nobody but itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response, StreamingResponse

from prorl_hpc.messages.errors import ServiceError
from prorl_hpc.messages.rollout import NumberedResult
from prorl_hpc.messages.trajectory import Trajectory
from prorl_hpc.service.calls import NDJSON, Asked, Call
from prorl_hpc.service.errors import answer_of
from prorl_hpc.service.limits import check_policy
from prorl_hpc.service.parameters import BATCH_ID, CURSOR, FOLLOW, LINE_LIMIT, POLICY, TRAJECTORIES
from prorl_hpc.service.protocol import RolloutService

PAGE = 32
KEEP_ALIVE_S = 10.0
_encoder = msgspec.json.Encoder()


def result_calls(service: RolloutService, keep_alive_s: float = KEEP_ALIVE_S) -> list[Call]:
    async def stream(asked: Asked) -> Response:
        query = asked.query
        if policy := query.get(POLICY):
            check_policy(policy, service.policies, POLICY.name, status=404)
        lines = _Lines(service, query.get(BATCH_ID), policy, query.get(CURSOR), query.get(LINE_LIMIT))
        wait_s = keep_alive_s if query.get(FOLLOW) else None
        # The first page now, so that a refusal still has its own status.
        first = await lines.page(0)
        return StreamingResponse(lines.send(first, wait_s, query.get(TRAJECTORIES)), media_type=NDJSON)

    params = (CURSOR, BATCH_ID, POLICY, LINE_LIMIT, FOLLOW, TRAJECTORIES)
    return [
        Call(
            "GET", "/v1/results", "Results in the order of their end, one a line", stream, NumberedResult,
            params=params, refusals=(404, 503), media_type=NDJSON,
        )
    ]  # fmt: skip


class _Lines:
    def __init__(self, service: RolloutService, batch_id: str, policy: str, cursor: int, limit: int | None) -> None:
        self._service = service
        self._batch_id, self._policy = batch_id, policy
        self._cursor = cursor
        self._left = limit

    async def page(self, wait_s: float) -> list[NumberedResult]:
        size = PAGE if self._left is None else min(PAGE, self._left)
        if not size:
            return []
        return await self._service.results(self._cursor, size, wait_s, self._batch_id, self._policy)

    async def send(self, page: list[NumberedResult], wait_s: float | None, trajectories: bool) -> AsyncIterator[bytes]:
        """``wait_s``: None ends the stream behind the last result; else a blank line is sent after so long without
        one. An error that comes after the first line is the last line."""
        while True:
            if self._left is not None:
                self._left -= len(page)
            at_end = not page
            if page:
                self._cursor = page[-1].cursor
                yield b"".join(_line(numbered, trajectories) for numbered in page)
            if self._left == 0 or (at_end and wait_s is None):
                return
            if at_end:
                yield b"\n"
            try:
                page = await self.page(wait_s or 0)
            except ServiceError as error:
                yield _encoder.encode(answer_of(error)) + b"\n"
                return


def _line(numbered: NumberedResult, trajectories: bool) -> bytes:
    if not trajectories:
        result = msgspec.structs.replace(numbered.result, trajectory=Trajectory())
        numbered = NumberedResult(numbered.cursor, result)
    return _encoder.encode(numbered) + b"\n"
