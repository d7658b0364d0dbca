"""Whether a server outside the run has our vocabulary: the same text must become the same ids there."""

from __future__ import annotations

import msgspec

from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.outside_client import OutsideClient
from prorl_hpc.inference.protocol import BadAnswer
from prorl_hpc.messages.errors import InferenceError

_TEXT = 'Hello, world! 0123456789 def f(x):\n\treturn x**2  # naïve café Ωμέγα 東京 🙂 <tool_call>{"a": [1.5e-3]}</tool_call>'
_MOST_SPECIAL = 64
_SHOWN_IDS = 8


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _EchoChoice(msgspec.Struct):
    prompt_token_ids: list[int]


class _Echo(msgspec.Struct):
    choices: list[_EchoChoice]


async def check_vocabulary(client: OutsideClient, model: str, ours: ModelText) -> None:
    """By /tokenize where the server has it (vLLM), else by the prompt ids that it returns for a text. InferenceError if
    they differ, or if it has neither. Control tokens are compared too: they are what a chat template is made of."""
    for text in (_TEXT, "".join(ours.special_tokens[:_MOST_SPECIAL])):
        expected = ours.encode(text)
        theirs = await _tokenize(client, model, text)
        if theirs != expected:
            place = next((i for i, (a, b) in enumerate(zip(theirs, expected, strict=False)) if a != b), len(expected))
            raise InferenceError(
                f"{client.name} has another vocabulary than this run's model: of {text[:40]!r}… it makes "
                f"{_shown(theirs, place)}, model.path makes {_shown(expected, place)} (from token {place} on): serve the "
                "model of model.path there, or give that model's directory here"
            )


def _shown(ids: list[int], place: int) -> str:
    return f"{ids[place : place + _SHOWN_IDS]} of {len(ids)} ids"


async def _tokenize(client: OutsideClient, model: str, text: str) -> list[int]:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        return msgspec.json.decode(await client.ask_beside("/tokenize", body), type=_Tokenized).tokens
    except (InferenceError, msgspec.DecodeError) as error:
        first = error
    body |= {"max_tokens": 1, "return_token_ids": True}
    try:
        (choice,) = msgspec.json.decode(await client.complete(body), type=_Echo).choices
    except (msgspec.DecodeError, ValueError) as error:
        raise BadAnswer(
            f"{client.name} does not show its vocabulary, which must be this run's: /tokenize failed ({first}), and "
            f"/v1/completions returns no prompt_token_ids for a text ({error})"
        ) from error
    return choice.prompt_token_ids
