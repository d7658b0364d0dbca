"""``python -m prorl_hpc.bench.stub_vllm SOCKET``: answers the routes of vLLM that an engine needs, at once and alike."""

from __future__ import annotations

import asyncio
import json
import sys

from prorl_hpc.inference.vllm_launcher import die_with_parent

ANSWER_TOKENS = 256


def answer() -> bytes:
    """Written as vLLM writes it."""
    ids = [(7919 * i) % 150_000 for i in range(ANSWER_TOKENS)]
    entries = [
        {"token_id": token, "logprob": -0.123456789012345 * (i % 9 + 1), "rank": 1} for i, token in enumerate(ids)
    ]
    content = [entry | {"top_logprobs": [entry]} for entry in entries]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
        "weight_versions": [{"version": "0", "start": 0, "end": ANSWER_TOKENS}],
    }
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}).encode()


async def serve(socket: str) -> None:
    from aiohttp import web

    generated = answer()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=generated, content_type="application/json")

    async def anything(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post("/inference/v1/generate", generate), web.route("*", "/{route:.*}", anything)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(sys.argv[1]))
