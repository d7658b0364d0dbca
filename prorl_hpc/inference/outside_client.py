"""An LLM server outside the run, over HTTP: vLLM or another that takes token ids and gives ids and logprobs back.

A coroutine that is cancelled closes its connection, which ends the generation. While requests wait for it, the server
is asked now and then whether it lives: a connection to a host that is gone says nothing.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from prorl_hpc.inference.protocol import BadAnswer, ServerDown
from prorl_hpc.inference.soundness import check_completion
from prorl_hpc.inference.vllm_wire import completion_of_completions, completions_body, refusal
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion, Generate

_UNIX = "unix:"
_MAX_ANSWER_BYTES = 64 << 20
_KEEP_IDLE_S = 2.0
"""Less than the 5 s after which uvicorn closes an idle connection: else a request may meet one being closed."""


@dataclass(frozen=True)
class ServedModel:
    """``max_model_len`` in tokens; None: the server does not say."""

    name: str
    max_model_len: int | None


class _Listed(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Listed]


def _cause(error: aiohttp.ClientError) -> str:
    """What the system says of a connection that could not be made, without how it was tried."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return str(error) or repr(error)
    cause = error.os_error
    if cause.errno is None or cause.errno <= 0 or isinstance(cause, ssl.SSLError):  # no number of the system's
        return str(cause.strerror or cause)
    return os.strerror(cause.errno).lower()


class OutsideClient:
    """``url`` is ``http(s)://host:port/v1`` or ``unix:/path``; InferenceError otherwise. Shared by all rollouts on that
    server. ``name`` is for messages. A turn that takes longer than ``turn_s`` is given up. Use inside a running event loop, and ``close`` it."""

    def __init__(
        self,
        server_id: str,
        url: str,
        api_key: str = "",
        *,
        ping_s: float = 2.0,
        lost_after_s: float = 20.0,
        turn_s: float = 120.0,
    ) -> None:
        self.name = f"LLM server {server_id} at {url}"
        self._ping_s = ping_s
        self._lost_after_s = lost_after_s
        self._turn_s = turn_s
        connector: aiohttp.BaseConnector
        if url.startswith(f"{_UNIX}/"):
            self._base = "http://outside/v1"
            connector = aiohttp.UnixConnector(url.removeprefix(_UNIX), limit=0, keepalive_timeout=_KEEP_IDLE_S)
        elif url.startswith(("http://", "https://")):
            self._base = url.rstrip("/")
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        else:
            raise InferenceError(f"{self.name}: the url must be http(s)://host:port/v1 or unix:/path")
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=lost_after_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._models: dict[str, ServedModel] = {}
        self._waiting: set[asyncio.Timeout] = set()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.name}")

    async def model(self, name: str) -> ServedModel:
        """The model of that name, or for an empty one the only one. InferenceError if it is not served."""
        if name not in self._models:
            self._models[name] = self._choose(name, await self._call("GET", "/models"))
        return self._models[name]

    def _choose(self, name: str, answer: bytes) -> ServedModel:
        try:
            listed = msgspec.json.decode(answer, type=_Models).data
        except msgspec.DecodeError as error:
            raise InferenceError(f"{self.name} does not list its models at /models: {error}") from error
        fitting = [model for model in listed if name in ("", model.id)]
        if len(fitting) != 1:
            served = ", ".join(model.id for model in listed) or "none"
            wanted = f"model {name} is not among them" if name else "say which one is meant (model)"
            raise InferenceError(f"{self.name} serves the models {served}: {wanted}")
        return ServedModel(fitting[0].id, fitting[0].max_model_len)

    async def generate(self, request: Generate, model: str, weight_version: int, vocab_size: int = 0) -> Completion:
        """``weight_version`` is what the tokens are marked with; ids are smaller than ``vocab_size``, unless that is 0.
        ServerDown (BadAnswer for one that training cannot have), or InferenceError for a request that it refuses."""
        try:
            async with asyncio.timeout(self._turn_s):
                return await self._generate(request, model, weight_version, vocab_size)
        except TimeoutError as error:
            raise ServerDown(
                f"{self.name} has not ended a turn of at most {request.sampling.max_tokens} tokens within "
                f"{self._turn_s:g} s (engine.outside_turn_s)"
            ) from error

    async def _generate(self, request: Generate, model: str, weight_version: int, vocab_size: int) -> Completion:
        served = await self.model(model)
        max_tokens = request.sampling.max_tokens
        if served.max_model_len is not None:
            room = served.max_model_len - len(request.token_ids)
            if room < 1:
                raise InferenceError(
                    f"{self.name}: the prompt has {len(request.token_ids)} tokens, the server's max_model_len is "
                    f"{served.max_model_len} and a turn needs at least one more"
                )
            max_tokens = min(max_tokens, room)
        body = completions_body(served.name, request.token_ids, request.sampling, max_tokens, request.request_id)
        answer = await self._call("POST", "/completions", body)
        completion = completion_of_completions(answer, request.token_ids, weight_version, self.name)
        check_completion(completion, vocab_size, self.name, max_tokens)
        return completion

    async def complete(self, body: Any) -> bytes:
        """POST to /v1/completions."""
        return await self._call("POST", "/completions", msgspec.json.encode(body))

    async def ask_beside(self, route: str, body: Any) -> bytes:
        """POST to a route that lies beside /v1, such as vLLM's /tokenize."""
        beside = self._base.removesuffix("/v1")
        return await self._call("POST", route, msgspec.json.encode(body), beside)

    async def _call(self, method: str, route: str, body: bytes | None = None, base: str = "") -> bytes:
        """ServerDown or InferenceError; what no answer within ``lost_after_s`` means, ``_watch`` finds out."""
        try:
            async with asyncio.timeout(None) as patience:
                self._waiting.add(patience)
                try:
                    return await self._exchange(method, (base or self._base) + route, route, body)
                finally:
                    self._waiting.discard(patience)
        except TimeoutError as error:
            raise ServerDown(f"{self.name} has not answered for {self._lost_after_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerDown(f"{self.name} does not answer {route}: {_cause(error)}") from error
        except ValueError as error:  # what cannot be put into HTTP, such as a key of two lines
            raise InferenceError(f"{self.name} cannot be asked for {route}: {error}") from error

    async def _exchange(self, method: str, url: str, route: str, body: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json"} if body else None
        # not redirected: the key is for this server
        async with self._session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            answer = bytearray()
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > _MAX_ANSWER_BYTES:
                    raise BadAnswer(f"{self.name} answers {route} with more than {_MAX_ANSWER_BYTES >> 20} MiB")
            if response.status != 200:
                raise refusal(self.name, route, response.status, answer.decode(errors="replace"))
            return bytes(answer)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._ping_s)
            if not self._waiting:
                continue
            try:
                async with asyncio.timeout(self._lost_after_s):
                    await self._until_alive()
            except TimeoutError:
                lost, self._waiting = self._waiting, set()
                for patience in lost:
                    patience.reschedule(0.0)

    async def _until_alive(self) -> None:
        """Any answer will do."""
        while True:
            try:
                async with self._session.get(self._base + "/models", allow_redirects=False):
                    return
            except (aiohttp.ClientError, ValueError):
                await asyncio.sleep(self._ping_s)

    async def close(self) -> None:
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        await self._session.close()
