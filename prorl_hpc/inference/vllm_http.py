"""HTTP to our own vLLM server, over its Unix socket: bytes in, bytes out, and whose fault it is if there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp

from prorl_hpc.inference.protocol import BadAnswer, ServerDown
from prorl_hpc.inference.vllm_wire import read_counters, refusal

_METRICS_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 256 << 20
_JSON = {"Content-Type": "application/json"}


class VllmHttp:
    """``name`` is for messages, ``last_words(what)`` tells of the process behind it. Use inside a running event loop."""

    def __init__(self, socket: Path, name: str, last_words: Callable[[str], str]) -> None:
        self._name = name
        self._last_words = last_words
        connector = aiohttp.UnixConnector(path=str(socket), limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 20,
        )

    async def post(self, route: str, body: bytes = b"") -> bytes:
        """The answer as it came. ServerDown or InferenceError says what the server said, or its last words."""
        headers = _JSON if body else None
        try:
            async with self._session.post(f"http://vllm{route}", data=body or None, headers=headers) as response:
                answer = await self._read(route, response)
                if response.status != 200:
                    raise refusal(self._name, route, response.status, answer.decode(errors="replace"))
                return answer
        except aiohttp.ClientError as error:
            raise ServerDown(f"{self._name}: {route}: {error!r}: {self._last_words('broke off')}") from error

    async def _read(self, route: str, response: aiohttp.ClientResponse) -> bytes:
        """All of it, unless there is no end to it."""
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_ANSWER_BYTES:
                raise BadAnswer(f"{self._name} answers {route} with more than {_MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(chunks)

    async def counters(self) -> dict[str, int]:
        """See ``read_counters``."""
        try:
            timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
            async with self._session.get("http://vllm/metrics", timeout=timeout) as response:
                return read_counters(await response.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ServerDown(f"{self._name}: the vLLM server does not answer /metrics: {error!r}") from error

    async def close(self) -> None:
        await self._session.close()
