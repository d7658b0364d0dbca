"""Whether a server outside the run will do, asked before any rollout is given to it, and now and then afterwards."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.inference.model_identity import identify_model
from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.outside_client import OutsideClient, ServedModel
from prorl_hpc.inference.outside_vocabulary import check_vocabulary
from prorl_hpc.inference.protocol import BadAnswer, NotServed, ServerDown
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Generate, OutsideServer
from prorl_hpc.messages.rollout import SamplingParams

_LIMIT_S = 15.0
_PROMPT = [1, 2, 3, 4]
_ASKED = SamplingParams(max_tokens=4, seed=0)
_NEEDED = (
    "needed is vLLM, or another server whose OpenAI-compatible /v1/models and /v1/completions take a prompt of token "
    "ids and return token_ids (return_token_ids) and a logprob for each"
)


@dataclass(frozen=True)
class ProbedServer:
    """``model`` is the name to ask it for; ``max_model_len`` in tokens, None: the server does not say. Ids that it may
    answer with are smaller than ``vocab_size``; 0: not known."""

    model: str
    max_model_len: int | None
    vocab_size: int = 0


class Unready(InferenceError):
    """It does not answer, or too slowly to be judged: perhaps it is just starting."""


async def probe(
    server: OutsideServer, model_path: Path | None = None, *, generate: bool = True, limit_s: float | None = None
) -> ProbedServer:
    """Find the model, compare its vocabulary with that of the model directory ``model_path`` (None: it is not compared),
    and ``generate`` a few tokens from ids. InferenceError with the reason if the server will not do; Unready
    if it may do later, which ``limit_s`` (by default 15 s) without an answer say."""
    limit_s = limit_s or _LIMIT_S
    client = OutsideClient(server.server_id, server.url, server.api_key, lost_after_s=_LIMIT_S, turn_s=limit_s)
    try:
        async with asyncio.timeout(limit_s):
            return await _probe(client, server, model_path, generate=generate)
    except TimeoutError:
        raise Unready(
            f"{client.name} has not listed its models, shown its vocabulary and generated {_ASKED.max_tokens} tokens "
            f"within {limit_s:g} s"
        ) from None
    except InferenceError as error:
        if isinstance(error, ServerDown) and not isinstance(error, BadAnswer | NotServed):
            raise Unready(str(error)) from error
        raise InferenceError(f"{error}; {_NEEDED}") from error
    finally:
        await client.close()


async def _probe(
    client: OutsideClient, server: OutsideServer, model_path: Path | None, *, generate: bool
) -> ProbedServer:
    served = await client.model(server.model)
    prompt, vocab_size = _PROMPT, 0
    if model_path is not None and (file := model_path / "tokenizer.json").is_file():
        ours, vocab_size = await asyncio.to_thread(_vocabulary, model_path, file.stat().st_mtime_ns)
        await check_vocabulary(client, served.name, ours)
        prompt = [*_PROMPT, ours.size - 1]
    if generate:
        await _check_answer(client, served, prompt, vocab_size)
    return ProbedServer(served.name, served.max_model_len, vocab_size)


@functools.lru_cache(maxsize=8)
def _vocabulary(model_path: Path, changed_ns: int) -> tuple[ModelText, int]:
    """The tokenizer, which may take a second to read, and how many ids the model can write. ``changed_ns``: when the file
    was last written, for another one is to be read anew."""
    ours = ModelText(model_path)
    return ours, max(identify_model(model_path).vocab_size, ours.size)


async def _check_answer(client: OutsideClient, served: ServedModel, prompt: list[int], vocab_size: int) -> None:
    """``prompt`` has our highest id in it, which a server with a smaller vocabulary refuses."""
    request = Generate("probe", "probe", prompt, _ASKED)
    completion = await client.generate(request, served.name, 0, vocab_size)
    if not any(completion.logprobs):
        raise InferenceError(
            f"{client.name} returned 0.0 as the logprob of each of {len(completion.token_ids)} tokens, drawn at "
            "temperature 1: these are no logprobs"
        )
