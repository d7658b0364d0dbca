"""The tool ``web_search``: asks ``task.web_search_url`` from the worker, since sandboxes have no network."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from prorl_hpc.tasks.protocol import WebSearch

_RESULTS = 8
_CONTENT_CHARS = 500
_ANSWER_BYTES = 4 << 20


def make_web_search(url: str) -> WebSearch | None:
    """``url`` has {query} in it; None if it is empty. Its answer is JSON like SearXNG's: {"results": [{"title", "url",
    "content"}, …]}."""
    if not url:
        return None

    async def search(query: str, timeout_s: float) -> str:
        import aiohttp

        asked = url.replace("{query}", quote(query, safe=""))
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
                session.get(asked, headers={"Accept": "application/json"}) as response,
            ):
                body = await _read(response.content)
                if response.status != 200:
                    raise OSError(f"it answered HTTP {response.status}")
        except aiohttp.ClientError as error:
            raise OSError(str(error) or type(error).__name__) from error
        return results_text(body)

    return search


def results_text(body: bytes) -> str:
    """The first results for a model to read; empty if there are none. OSError if it is not such JSON."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise OSError("it answered something else than JSON") from error
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        raise OSError('it answered JSON without a list "results"')
    return "\n\n".join(_result_text(result) for result in results[:_RESULTS] if isinstance(result, dict))


def _result_text(result: dict[str, Any]) -> str:
    lines = [str(result.get(name) or "").strip() for name in ("title", "url", "content")]
    lines[2] = lines[2][:_CONTENT_CHARS]
    return "\n".join(line for line in lines if line)


async def _read(content: Any) -> bytes:
    body = b""
    async for chunk in content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > _ANSWER_BYTES:
            raise OSError(f"it answered more than {_ANSWER_BYTES >> 20} MiB")
    return body
