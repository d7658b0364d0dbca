from __future__ import annotations

import asyncio

from prorl_hpc.inference.priority_gate import PriorityGate


async def test_a_waiter_that_is_cancelled_just_as_it_is_let_in_passes_its_slot_on() -> None:
    gate = PriorityGate(1)
    entered: list[str] = []

    async def enter(name: str) -> None:
        async with gate.slot(0):
            entered.append(name)

    async with gate.slot(0):
        first, second = asyncio.create_task(enter("first")), asyncio.create_task(enter("second"))
        await asyncio.sleep(0)
        assert gate.waiting == 2
    first.cancel()  # it has its slot by now, but has not run
    await asyncio.gather(first, second, return_exceptions=True)
    assert entered == ["second"]
    async with gate.slot(0):
        assert gate.waiting == 0
