"""Which prompt tokens a scripted engine has cached."""

from __future__ import annotations

from prorl_hpc.config.script_settings import ScriptSettings
from prorl_hpc.inference.prefix_cache import PrefixCache
from prorl_hpc.inference.scripted_engine import ScriptedEngine
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams


def kept(cache: PrefixCache, *prompts: range) -> PrefixCache:
    for prompt in prompts:
        cache.keep(prompt, cache.generation)
    return cache


def test_whole_blocks_of_a_prefix_are_found() -> None:
    cache = kept(PrefixCache(1000, 4), range(10))
    assert cache.cached_tokens(range(30)) == 8
    assert cache.cached_tokens([*range(4), 99, *range(5, 10)]) == 4
    assert cache.cached_tokens(range(1, 10)) == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert kept(PrefixCache(1000, 4), range(8)).cached_tokens(range(8)) == 4


def test_the_least_recently_used_goes_and_of_a_prompt_its_end_first() -> None:
    cache = kept(PrefixCache(12, 4), range(8), range(100, 104))
    assert cache.cached_tokens(range(9)) == 8
    kept(cache, range(200, 204))
    assert cache.cached_tokens(range(100, 105)) == 0 and cache.cached_tokens(range(9)) == 8
    kept(cache, range(300, 304), range(400, 404))
    assert cache.cached_tokens(range(9)) == 4


def test_nothing_stays_of_what_was_begun_before_all_was_forgotten() -> None:
    cache = kept(PrefixCache(1000, 4), range(8))
    before = cache.generation
    cache.forget()
    cache.keep(range(8), before)
    assert cache.cached_tokens(range(9)) == 0


def test_without_room_nothing_is_kept() -> None:
    assert kept(PrefixCache(0, 4), range(8)).cached_tokens(range(9)) == 0


async def test_an_engine_tells_cached_tokens_and_forgets_them_with_new_weights() -> None:
    engine = ScriptedEngine({(1, 2): [3, 4, 5], (1, 2, 3, 4, 5, 6): [7]}, ScriptSettings(cache_tokens=64, block_size=2))

    async def cached(*prompt: int) -> int:
        return (await engine.generate("r", prompt, SamplingParams(), 50)).cached_prompt_tokens

    assert await cached(1, 2) == 0
    assert await cached(1, 2, 3, 4, 5, 6) == 4
    await engine.update_weights(WeightUpdate(1, []))
    assert await cached(1, 2, 3, 4, 5, 6) == 0
