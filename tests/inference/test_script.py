"""What a scripted engine answers and how long it takes, by its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.config.schema import EngineConfig, ProrlConfig
from prorl_hpc.config.script_settings import ScriptSettings, script_errors, script_settings
from prorl_hpc.inference.model_text import ModelText
from prorl_hpc.inference.script import Latency, pseudo_random_reply, script_of
from prorl_hpc.inference.scripted_engine import ScriptedEngine
from prorl_hpc.messages.errors import ConfigError, InferenceError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.tasks.testing import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


def replay(path: Path, *lines: Any) -> ScriptSettings:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return ScriptSettings(replay=str(path))


async def test_a_replay_answers_ids_and_texts(tmp_path: Path, model: Path) -> None:
    text = ModelText(model)
    lines = {"prompt": "<|im_start|>user the file", "reply": "answer: 42<|im_end|>"}, {"prompt": [1, 2], "reply": [3]}
    engine = ScriptedEngine(script_of(replay(tmp_path / "r.jsonl", *lines), model))
    prompt = text.encode("<|im_start|>user the file")
    answer = await engine.generate("r", prompt, SamplingParams(), 50)
    assert text.decode(answer.token_ids) == "answer: 42<|im_end|>"
    assert (await engine.generate("r", [1, 2], SamplingParams(), 50)).token_ids == [3]
    with pytest.raises(InferenceError, match="no reply to the prompt"):
        await engine.generate("r", [2], SamplingParams(), 50)


def test_a_replay_that_cannot_be_read_is_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"r.jsonl, line 2: must be"):
        script_of(replay(tmp_path / "r.jsonl", {"prompt": [1], "reply": [2]}, {"prompt": 1}), model)
    with pytest.raises(ConfigError, match="cannot be read"):
        script_of(ScriptSettings(replay=str(tmp_path / "none")), model)


def test_replies_have_the_length_that_is_asked_for_and_repeat_by_seed() -> None:
    settings = ScriptSettings(reply_min_tokens=5, reply_max_tokens=9, seed=1)
    lengths = {len(pseudo_random_reply([i], SamplingParams(max_tokens=50), settings)) for i in range(200)}
    assert lengths == {5, 6, 7, 8, 9}
    assert len(pseudo_random_reply([1], SamplingParams(max_tokens=3), settings)) == 3
    sampling = SamplingParams(seed=4)
    assert pseudo_random_reply([1], sampling, settings) == pseudo_random_reply([1], sampling, settings)
    assert pseudo_random_reply([1], sampling, settings) != pseudo_random_reply([1], sampling, ScriptSettings(seed=2))


def test_times_by_prompt_and_load() -> None:
    settings = ScriptSettings(
        first_token_s=1.0,
        first_token_s_per_1k=2.0,
        first_token_s_per_request=0.5,
        token_s=0.1,
        token_s_per_request=0.01,
    )
    latency = Latency(settings, [0] * 500, SamplingParams())
    assert latency.first_token_s(others=4) == pytest.approx(1.0 + 1.0 + 2.0)
    assert latency.token_s(others=5) == pytest.approx(0.15)


def test_jitter_spreads_around_the_time_and_repeats_by_seed() -> None:
    def time(prompt: int, seed: int) -> float:
        return Latency(ScriptSettings(token_s=1.0, jitter=0.2, seed=seed), [prompt], SamplingParams(seed=0)).token_s(0)

    times = sorted(time(prompt, 0) for prompt in range(501))
    assert times[250] == pytest.approx(1.0, abs=0.05) and times[100] < 0.95 and times[400] > 1.05
    assert time(3, 0) == time(3, 0) != time(3, 1)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"tokn_s": 1}, "engine.script.tokn_s=1: there is no such setting; known are replay, seed"),
        ({"token_s": -1}, "engine.script.token_s=-1: must be a number, 0 or more"),
        (
            {"token_s": 1e12},
            "engine.script.token_s=1000000000000.0: must be at most 3600 (an hour), for it is in seconds",
        ),
        ({"stall_s_per_1k": 3601}, "engine.script.stall_s_per_1k=3601: must be at most 3600"),
        ({"jitter": 1000}, "engine.script.jitter=1000: must be at most 3, for it is relative"),
        ({"token_s": "fast"}, "must be a number"),
        ({"token_s": float("inf")}, "must be a number"),
        ({"seed": 1.5}, "must be a whole number"),
        ({"replay": 3}, "must be the path"),
        ({"reply_min_tokens": 4, "reply_max_tokens": 2}, "is more than"),
    ],
)
def test_settings_that_cannot_be_are_named(script: dict[str, Any], words: str) -> None:
    (error,) = script_errors(ProrlConfig(engine=EngineConfig(kind="scripted", script=script)))
    assert words in error
    with pytest.raises(ValueError, match=r"engine\.script"):
        script_settings(script)


def test_a_script_for_another_engine_is_refused() -> None:
    (error,) = script_errors(ProrlConfig(engine=EngineConfig(kind="vllm", script={"seed": 1})))
    assert "engine.kind=vllm" in error
    assert list(script_errors(ProrlConfig())) == []
