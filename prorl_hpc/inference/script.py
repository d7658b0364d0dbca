"""What a scripted engine answers, and how long it takes: replays and latency models. Deterministic by seed."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from prorl_hpc.config.script_settings import ScriptSettings
from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.messages.errors import ConfigError, InferenceError
from prorl_hpc.messages.rollout import SamplingParams

Reply: TypeAlias = Callable[[Sequence[int], SamplingParams], Sequence[int]]

_VOCABULARY = 256
DEFAULTS = ScriptSettings()


class _Line(msgspec.Struct):
    prompt: list[int] | str
    reply: list[int] | str


def pseudo_random_reply(
    token_ids: Sequence[int], sampling: SamplingParams, settings: ScriptSettings = DEFAULTS
) -> list[int]:
    """Ids that depend on prompt and seeds alone, of any length up to ``max_tokens`` that ``settings`` allow, ended by a
    stop token if there is one: none comes before, or a turn could not be as long as it is to be."""
    source = _source(token_ids, sampling, settings.seed)
    most = min(settings.reply_max_tokens or sampling.max_tokens, sampling.max_tokens)
    least = max(1, min(settings.reply_min_tokens, most))
    plain = [token for token in range(_VOCABULARY) if token not in sampling.stop_token_ids]
    ids = [plain[source.randrange(len(plain))] for _ in range(source.randint(least, most))]
    return ids[:-1] + sampling.stop_token_ids[:1] if sampling.stop_token_ids else ids


def _source(token_ids: Sequence[int], sampling: SamplingParams, seed: int) -> random.Random:
    return random.Random(zlib.crc32(f"{list(token_ids)} {sampling.seed} {seed}".encode()))


def read_replay(path: Path, text: ModelText) -> dict[tuple[int, ...], list[int]]:
    """Prompt → reply. ConfigError names the line that is wrong."""
    replies: dict[tuple[int, ...], list[int]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"engine.script.replay={path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f'engine.script.replay={path}, line {number}: must be {{"prompt": …, "reply": …}}, each a list of token '
                f"ids or a text: {error}"
            ) from error
        prompt, reply = (part if isinstance(part, list) else text.encode(part) for part in (read.prompt, read.reply))
        replies[tuple(prompt)] = reply
    return replies


def replaying(replies: Mapping[tuple[int, ...], Sequence[int]]) -> Reply:
    """The reply that was recorded for a prompt; InferenceError if there is none."""

    def reply(token_ids: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        try:
            return replies[tuple(token_ids)]
        except KeyError:
            raise InferenceError(f"the script has no reply to the prompt {list(token_ids)}") from None

    return reply


class Latency:
    """Seconds of one request, by its prompt and by who else is in the engine."""

    def __init__(self, settings: ScriptSettings, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._settings = settings
        self.prompt_tokens = len(token_ids)
        spread = _source(token_ids, sampling, settings.seed + 1).gauss(0.0, settings.jitter) if settings.jitter else 0.0
        self._factor = math.exp(spread)

    def first_token_s(self, others: int, cached_tokens: int = 0) -> float:
        """Beyond the token's own ``token_s``."""
        given = self._settings
        prefill = given.first_token_s + given.first_token_s_per_1k * (self.prompt_tokens - cached_tokens) / 1000
        return self._factor * (prefill + given.first_token_s_per_request * others)

    def token_s(self, others: int) -> float:
        return self._factor * (self._settings.token_s + self._settings.token_s_per_request * others)

    def held_up_s(self, prompt_tokens: int) -> float:
        """By so many uncached prompt tokens of requests that began meanwhile."""
        return self._factor * self._settings.stall_s_per_1k * prompt_tokens / 1000


def script_of(settings: ScriptSettings, model_path: Path) -> Reply:
    """ConfigError for a replay that cannot be read."""
    if settings.replay:
        return replaying(read_replay(Path(settings.replay).expanduser(), ModelText(model_path)))

    def reply(token_ids: Any, sampling: SamplingParams) -> Sequence[int]:
        return pseudo_random_reply(token_ids, sampling, settings)

    return reply
