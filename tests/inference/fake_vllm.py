"""A server that speaks as much of vLLM as the engine needs, and misbehaves on demand.

    python fake_vllm.py SOCKET [MODE…]      modes: die, hang, no-logprobs, no-ids, fail-update, strays
                                            (a child in a session of its own, and
                                            shared memory). A prompt that begins with 900 + i is
                                            answered with GARBAGE[i].

Started as vLLM would be (own process group, standard input held by its parent). ``GET /calls`` lists the routes
that were posted to. ``serve_outside`` serves the OpenAI-compatible routes from within a test; its modes: no-ids,
no-logprobs, other-logprobs, other-prompt, two-models, silent, broken, key, busy, endless, zeros, small, no-tokenize, no-echo,
no-tokens, more (than asked for), trickle (spaces without end), page (404 in HTML), and those
of GARBAGE.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.vllm_launcher import die_with_parent

CALLS: list[str] = []
VERSION = "default"
MAPS: list[mmap.mmap] = []


GARBAGE = ("html", "empty", "null", "nan", "positive", "big-ids", "words", "endless-answer")
"""Ways to answer 200 with what training may not have."""


def garbage(modes: Sequence[str], choice: dict[str, Any]) -> web.Response | None:
    """An answer that is none; or None, after ``choice`` (of either route) may have been spoilt."""
    bodies = {"html": b"<html><body>502 Bad Gateway</body></html>", "empty": b"", "null": b"null"}
    bodies["endless-answer"] = b" " * (300 << 20)
    for mode in modes:
        if mode in bodies:
            return web.Response(body=bodies[mode])
    logprobs, ids = choice["logprobs"], choice["token_ids"]
    values = {"nan": float("nan"), "positive": 0.25}
    for mode in set(modes) & set(values):
        if "content" in logprobs:
            logprobs["content"][-1]["logprob"] = values[mode]
        else:
            logprobs["token_logprobs"][-1] = values[mode]
    if "big-ids" in modes or "words" in modes:
        ids[-1] = 10**6 if "big-ids" in modes else "word"
        if "content" in logprobs:
            logprobs["content"][-1]["token_id"] = ids[-1]
        else:
            logprobs["tokens"][-1] = f"token_id:{ids[-1]}"
    return None


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def calls(request: web.Request) -> web.Response:
    return web.json_response(CALLS)


async def metrics(request: web.Request) -> web.Response:
    lines = ["# HELP x", 'vllm:num_requests_running{engine="0"} 1.0', 'vllm:prompt_tokens_total{engine="0"} 12.0']
    return web.Response(text="\n".join([*lines, 'vllm:generation_tokens_total{engine="0"} 3.0']))


async def generate(request: web.Request) -> web.Response:
    body = await request.json()
    modes = request.app["modes"]
    if body["token_ids"][0] == 666:
        print("CUDA error: an illegal memory access was encountered", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if body["token_ids"][0] == 777:
        await asyncio.sleep(3600)
    ids = [5, 6]
    logprobs = [{"token_id": i, "logprob": -0.5, "rank": 1, "top_logprobs": []} for i in ids]
    choice = {
        "index": 0,
        "token_ids": None if "no-ids" in modes else ids,
        "logprobs": None if "no-logprobs" in modes else {"content": logprobs},
        "finish_reason": "stop",
        "weight_versions": [{"version": VERSION, "start": 0, "end": 2}],
    }
    wanted = GARBAGE[body["token_ids"][0] - 900 :][:1] if body["token_ids"][0] >= 900 else ()
    if (spoilt := garbage(wanted, choice)) is not None:
        return spoilt
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})


async def anything(request: web.Request) -> web.Response:
    global VERSION
    CALLS.append(request.path)
    body = json.loads(await request.text() or "{}")
    VERSION = body.get("new_version") or body.get("weight_version") or VERSION
    if request.path == "/update_weights" and "fail-update" in request.app["modes"]:
        return web.json_response({"error": "shape mismatch in layer 3"}, status=500)
    return web.json_response({})


CONTEXT = 512
PAGE = f"<!DOCTYPE html>\n<html>\n<style>body {{{'color: red; ' * 50}}}</style>\n<h1>404</h1>\n<p>No such page.</p>\n{'word ' * 500}</html>"
API_KEY = "open sesame"


class OutsideFake:
    """``url`` of a fake that serves from within this process, and the requests that it is generating for. On TCP if
    ``path`` is None."""

    def __init__(self, path: Path | None, modes: tuple[str, ...], model: Path | None = None) -> None:
        """``model``: a directory whose tokenizer it has."""
        self.url = f"unix:{path}"
        self.in_flight: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        self._path = path
        self._modes = modes
        self._text = ModelText(model) if model is not None else None
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._completions)])
        if model is not None and "no-tokenize" not in modes:
            app.add_routes([web.post("/tokenize", self._tokenize)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)

    async def start(self) -> None:
        await self._runner.setup()
        if self._path is not None:
            await web.UnixSite(self._runner, str(self._path)).start()
            return
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _refused(self, request: web.Request) -> web.Response | None:
        if "page" in self._modes:
            return web.Response(status=404, content_type="text/html", text=PAGE)
        if "silent" in self._modes:
            await asyncio.sleep(3600)
        if "key" in self._modes and request.headers.get("Authorization") != f"Bearer {API_KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"error": "EngineDeadError"}, status=500) if "broken" in self._modes else None

    async def _models(self, request: web.Request) -> web.Response:
        names = ["policy", "other"] if "two-models" in self._modes else ["policy"]
        listed = [{"id": name, "object": "model", "max_model_len": CONTEXT} for name in names]
        if "endless" in self._modes:
            return web.Response(body=b" " * (65 << 20))
        return await self._refused(request) or web.json_response({"object": "list", "data": listed})

    async def _tokenize(self, request: web.Request) -> web.Response:
        assert self._text is not None
        return web.json_response({"tokens": self._text.encode((await request.json())["prompt"])})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if (refused := await self._refused(request)) is not None:
            return refused
        if isinstance(body["prompt"], str):
            body["prompt"] = [1] if self._text is None else self._text.encode(body["prompt"])
        body.setdefault("request_id", "unnamed")
        if "small" in self._modes and max(body["prompt"]) >= 300:
            return web.json_response({"error": f"Token id {max(body['prompt'])} is out of vocabulary"}, status=400)
        if len(body["prompt"]) + body["max_tokens"] > CONTEXT:
            return web.json_response({"error": "This model's maximum context length is 512 tokens"}, status=400)
        self.in_flight.add(body["request_id"])
        try:
            if "busy" in self._modes:
                await asyncio.sleep(3600)
            if "trickle" in self._modes:
                return await self._trickle(request)
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0.001)
        finally:
            self.in_flight.discard(body["request_id"])
        return self._answer(body)

    async def _trickle(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)

    def _answer(self, body: dict[str, Any]) -> web.Response:
        word = f"{body['prompt']} {body.get('seed')}"
        count = 0 if "no-tokens" in self._modes else body["max_tokens"] + ("more" in self._modes)
        ids = [zlib.crc32(f"{word} {i}".encode()) % 256 for i in range(count)]
        logprobs = [0.0 if "zeros" in self._modes else -0.5] * (len(ids) + ("other-logprobs" in self._modes))
        with_ids = "no-ids" not in self._modes
        choice = {
            "index": 0,
            "text": "la " * len(ids),
            "finish_reason": "length",
            "token_ids": ids if with_ids else None,
            "prompt_token_ids": [0, *body["prompt"]] if "other-prompt" in self._modes else body["prompt"],
            "logprobs": {
                "tokens": [f"token_id:{i}" if with_ids else "la" for i in ids],
                "token_logprobs": logprobs,
            },
        }
        if "no-logprobs" in self._modes:
            choice["logprobs"] = None
        if "no-echo" in self._modes:
            del choice["prompt_token_ids"]
        if (spoilt := garbage(self._modes, choice)) is not None:
            return spoilt
        answer = {"id": "x", "object": "text_completion", "model": body["model"], "choices": [choice]}
        return web.json_response(answer)


@asynccontextmanager
async def serve_outside(path: Path | None, *modes: str, model: Path | None = None) -> AsyncIterator[OutsideFake]:
    fake = OutsideFake(path, modes, model)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


async def main(path: Path, modes: list[str]) -> None:
    print("Starting to load model", flush=True)
    if "die" in modes:
        sys.exit("ValueError: No available memory for the cache blocks.")
    if "hang" in modes:
        await asyncio.sleep(3600)
    child = subprocess.Popen(["sleep", "3600"])  # an engine process of vLLM's own
    Path(f"{path}.child").write_text(str(child.pid))
    if "strays" in modes:
        shared = Path(f"/dev/shm/vllm_fake_{os.getpid()}")
        shared.write_bytes(b"x" * mmap.PAGESIZE)
        with shared.open("r+b") as file:
            MAPS.append(mmap.mmap(file.fileno(), 0))
        Path(f"{path}.shared").write_text(str(shared))
        stray = subprocess.Popen(["sleep", "3600"], start_new_session=True)  # a worker that left the group
        Path(f"{path}.stray").write_text(str(stray.pid))
    app = web.Application(client_max_size=64 << 20)
    app["modes"] = modes
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics), web.get("/calls", calls)])
    app.add_routes([web.post("/inference/v1/generate", generate), web.post("/{route:.*}", anything)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
