"""A server that speaks as much of vLLM as the engine needs, and misbehaves on demand.

    python fake_vllm.py SOCKET [MODE…]      modes: die, hang, die-later, no-logprobs, no-ids, fail-update

Started as vLLM would be (own process group, standard input held by its parent). ``GET /calls`` lists the routes
that were posted to.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from aiohttp import web

from prorl_hpc.inference.vllm_launcher import die_with_parent

CALLS: list[str] = []
VERSION = "default"


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
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})


async def anything(request: web.Request) -> web.Response:
    global VERSION
    CALLS.append(request.path)
    body = json.loads(await request.text() or "{}")
    VERSION = body.get("new_version") or body.get("weight_version") or VERSION
    if request.path == "/update_weights" and "fail-update" in request.app["modes"]:
        return web.json_response({"error": "shape mismatch in layer 3"}, status=500)
    return web.json_response({})


async def main(path: Path, modes: list[str]) -> None:
    print("Starting to load model", flush=True)
    if "die" in modes:
        sys.exit("ValueError: No available memory for the cache blocks.")
    if "hang" in modes:
        await asyncio.sleep(3600)
    child = subprocess.Popen(["sleep", "3600"])  # an engine process of vLLM's own
    Path(f"{path}.child").write_text(str(child.pid))
    app = web.Application()
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
