"""vLLM's own HTTP on its Unix socket: to compare with, and to read what the engine counts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from prorl_hpc.messages.errors import RunError

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
CACHE_QUERIES, CACHE_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
GENERATED = "vllm:generation_tokens_total"
_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info{.*\bblock_size="(\d+)"', re.MULTILINE)
COUNTERS = (RUNNING, WAITING, CACHE_QUERIES, CACHE_HITS, GENERATED)


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def parse_counters(metrics: str) -> dict[str, float]:
    """COUNTERS out of the Prometheus text, summed over engines; 0 where one is not there."""
    totals = dict.fromkeys(COUNTERS, 0.0)
    for line in metrics.splitlines():
        name = line.split("{", 1)[0]
        if name in totals:
            totals[name] += float(line.rsplit(" ", 1)[1])
    return totals


class VllmDoor:
    """Use inside a running event loop, and ``close`` it. All raise RunError if the server refuses."""

    def __init__(self, socket: Path) -> None:
        connector = aiohttp.UnixConnector(path=str(socket), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._numbers = itertools.count()

    async def counters(self) -> dict[str, float]:
        return parse_counters((await self._call("GET", "/metrics")).decode())

    async def block_size(self) -> int:
        """Tokens of a block of the prefix cache."""
        found = _BLOCK_SIZE.search((await self._call("GET", "/metrics")).decode())
        if found is None:
            raise RunError("vLLM's metrics do not tell the block size of its cache")
        return int(found[1])

    async def forget(self) -> None:
        """Empty the prefix cache."""
        await self._call("POST", "/reset_prefix_cache")

    async def generate(self, token_ids: Sequence[int], sampling: dict[str, Any]) -> list[int]:
        """As quick as a worker could ask by itself: one request, written and read by msgspec."""
        body = {
            "model": "policy",
            "request_id": f"direct-{next(self._numbers)}",
            "token_ids": token_ids,
            "sampling_params": sampling,
            "cache_salt": "direct",
        }
        answer = await self._call("POST", "/inference/v1/generate", msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=_Answer).choices[0].token_ids

    async def post(self, route: str, body: Any = None) -> bytes:
        """``body`` as JSON, if it is not None."""
        return await self._call("POST", route, b"" if body is None else msgspec.json.encode(body))

    async def close(self) -> None:
        await self._session.close()

    async def _call(self, method: str, route: str, body: bytes = b"") -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with self._session.request(method, f"http://vllm{route}", data=body, headers=headers) as response:
                content = await response.read()
                if response.status != 200:
                    raise RunError(
                        f"vLLM answers {response.status} to {route}: {content[:500].decode(errors='replace')}"
                    )
                return content
        except aiohttp.ClientError as error:
            raise RunError(f"vLLM does not answer {route}: {error!r}") from error
