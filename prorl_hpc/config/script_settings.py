"""``engine.script``: what a scripted engine answers and how long it takes, for runs without a model."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from prorl_hpc.config.schema import ProrlConfig


@dataclass(frozen=True)
class ScriptSettings:
    """Time to the first token: ``first_token_s`` + ``first_token_s_per_1k`` for each 1,000 prompt tokens that are not cached
    + ``first_token_s_per_request`` for each other request in the engine. Each token: ``token_s`` +
    ``token_s_per_request`` for each other request; and a request that begins holds up all others by ``stall_s_per_1k`` for
    each 1,000 of its prompt tokens that are not cached, as an engine that reads prompts between two tokens of everybody.
    All times are drawn around that with a relative spread of ``jitter`` (the sigma of a log-normal), the same for the same
    ``seed``, prompt and sampling seed. More than engine.max_parallel_requests wait, as for every engine."""

    replay: str = ""
    """JSONL of {"prompt": ids or text, "reply": ids or text}; empty: pseudo-random replies."""
    seed: int = 0
    reply_min_tokens: int = 1
    reply_max_tokens: int = 0
    """Length of pseudo-random replies, equally likely between these; 0: what is asked for at most."""
    first_token_s: float = 0.0
    first_token_s_per_1k: float = 0.0
    first_token_s_per_request: float = 0.0
    token_s: float = 0.0
    token_s_per_request: float = 0.0
    stall_s_per_1k: float = 0.0
    jitter: float = 0.0
    cache_tokens: int = 0
    """What the prefix cache holds; 0: there is none."""
    block_size: int = 32
    """Tokens of one block of the prefix cache: prefixes are found block by block."""
    fitted: str = ""
    """Where these times come from, for reports: a fit says its run. Changes nothing."""


LONGEST_S = 3600.0
"""Of any time: more is a mistake, such as milliseconds for seconds."""
MOST_JITTER = 3.0
"""A twentieth of all times are then more than 100 times what is set."""
_TIMES = {
    "first_token_s": "first token {:.4g} s",
    "first_token_s_per_1k": "+ {:.4g} s per 1,000 prompt tokens not cached",
    "first_token_s_per_request": "+ {:.4g} s per other request",
    "token_s": "each token {:.4g} s",
    "token_s_per_request": "+ {:.4g} s per other request",
    "stall_s_per_1k": "held up {:.4g} s per 1,000 prompt tokens of others",
    "jitter": "spread {:.0%}",
    "cache_tokens": "prefix cache of {:,} tokens",
}


def latency_words(settings: ScriptSettings) -> str:
    """How long a scripted engine takes, for a report: ``first token 0.05 s, each token 0.02 s``."""
    given = [words.format(value) for name, words in _TIMES.items() if (value := getattr(settings, name))]
    return ", ".join(given or ["takes no time"]) + (f" (fitted: {settings.fitted})" if settings.fitted else "")


def script_settings(script: Mapping[str, Any]) -> ScriptSettings:
    """ValueError with all that is wrong."""
    if wrong := list(_errors(script)):
        raise ValueError("; ".join(wrong))
    return ScriptSettings(**script)


def script_errors(config: ProrlConfig) -> Iterator[str]:
    """Each as one sentence that names the setting, what was given and what is allowed."""
    if config.engine.script and config.engine.kind != "scripted":
        yield f"engine.script is given, but engine.kind={config.engine.kind}: it is for engine.kind=scripted alone"
    yield from _errors(config.engine.script)
    if config.engine.record_requests and config.cluster.inference.nodes == 0:
        yield (
            "engine.record_requests=true with cluster.inference.nodes=0: only this run's own LLM servers record what requests "
            "cost, those of engine.outside do not; leave it out"
        )


def _errors(script: Mapping[str, Any]) -> Iterator[str]:
    known = {field.name: field.default for field in fields(ScriptSettings)}
    for name, value in script.items():
        told = f"engine.script.{name}={value}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            suggestion = f" (did you mean {near[0]}?)" if near else ""
            yield f"{told}: there is no such setting; known are {', '.join(known)}{suggestion}"
        elif isinstance(known[name], str):
            if not isinstance(value, str):
                yield f"{told}: must be {'the path of a JSONL file' if name == 'replay' else 'a text'}"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            yield f"{told}: must be a number, 0 or more"
        elif name == "jitter" and value > MOST_JITTER:
            yield f"{told}: must be at most {MOST_JITTER:g}, for it is relative: 0.1 spreads times by about a tenth"
        elif isinstance(known[name], float) and name != "jitter" and value > LONGEST_S:
            yield f"{told}: must be at most {LONGEST_S:g} (an hour), for it is in seconds"
        elif isinstance(known[name], int) and not isinstance(value, int):
            yield f"{told}: must be a whole number"
    if script.get("block_size", 1) == 0:
        yield "engine.script.block_size=0: must be at least 1"
    least, most = script.get("reply_min_tokens", 1), script.get("reply_max_tokens", 0)
    if isinstance(least, int) and isinstance(most, int) and 0 < most < least:
        yield f"engine.script.reply_min_tokens={least} is more than engine.script.reply_max_tokens={most}"
