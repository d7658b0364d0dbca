"""Waiting for something that another process or task brings about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], patience_s: float = 60) -> None:
    """Return when ``condition`` holds; TimeoutError if it never does."""
    async with asyncio.timeout(patience_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(0.02)
