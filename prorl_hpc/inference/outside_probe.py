"""Whether a server outside the run will do, asked before any rollout is given to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prorl_hpc.inference.outside_client import OutsideClient
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Generate, OutsideServer
from prorl_hpc.messages.rollout import SamplingParams

_LIMIT_S = 10.0
_PROMPT = [1, 2, 3, 4]
_NEEDED = (
    "needed is vLLM, or another server whose OpenAI-compatible /v1/models and /v1/completions take a prompt of token "
    "ids and return token_ids (return_token_ids) and a logprob for each"
)


@dataclass(frozen=True)
class ProbedServer:
    """``model`` is the name to ask it for; ``max_model_len`` in tokens, None: the server does not say."""

    model: str
    max_model_len: int | None


async def probe(server: OutsideServer) -> ProbedServer:
    """Find the model, and generate two tokens from ids. InferenceError if the server will not do, within 10 s."""
    client = OutsideClient(server.server_id, server.url, server.api_key, lost_after_s=_LIMIT_S)
    try:
        async with asyncio.timeout(_LIMIT_S):
            served = await client.model(server.model)
            request = Generate(f"probe-{server.server_id}", "probe", _PROMPT, SamplingParams(max_tokens=2, seed=0))
            completion = await client.generate(request, served.name, 0)
    except TimeoutError:
        raise InferenceError(
            f"LLM server {server.server_id} at {server.url} has not generated two tokens within {_LIMIT_S:g} s"
        ) from None
    except InferenceError as error:
        raise InferenceError(f"{error}; {_NEEDED}") from error
    finally:
        await client.close()
    if not completion.token_ids:
        raise InferenceError(
            f"LLM server {server.server_id} at {server.url} was asked for two tokens and returned none; {_NEEDED}"
        )
    return ProbedServer(served.name, served.max_model_len)
