"""Latency models from records of requests: what goes in comes out, and what tells too little is refused."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prorl_hpc.bench.fit import LatencyFit, fit, fit_records, latency_file, write_fit
from prorl_hpc.bench.fit_rows import non_negative_least_squares
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.script_settings import ScriptSettings, script_settings
from prorl_hpc.config.store import compose, conf_dir
from prorl_hpc.inference.request_records import RequestRecord, ServedBy
from prorl_hpc.messages.errors import ConfigError

TRUTH = ScriptSettings(
    first_token_s=0.05,
    first_token_s_per_1k=0.4,
    first_token_s_per_request=0.01,
    token_s=0.02,
    token_s_per_request=0.003,
    stall_s_per_1k=0.2,
)


def served(count: int, slots: int, jitter: float = 0.0, seed: int = 0, even: str = "") -> list[RequestRecord]:
    """Requests of an engine that follows TRUTH, which took ``slots`` at once, in steps of a token of everybody. ``even``:
    which of prompts and turns are all alike."""
    source = random.Random(seed)
    records: list[RequestRecord] = []
    now, running = 0.0, 0
    active: list[list[float]] = []  # [seconds to the next token, tokens left, index]
    open_: dict[int, list[float]] = {}
    arrivals = [0.0] * slots
    started = 0
    while len(records) < count:
        while arrivals and arrivals[0] <= now and started < count:
            heapq.heappop(arrivals)
            prompt = 300 if even == "prompts" else source.randint(20, 2000)
            turn = 50 if even == "turns" else source.randint(5, 150)
            factor = source.lognormvariate(0.0, jitter)
            for other in active:
                other[0] += open_[int(other[2])][4] * TRUTH.stall_s_per_1k * prompt / 1000
            first = TRUTH.first_token_s + TRUTH.first_token_s_per_1k * prompt / 1000
            first += TRUTH.first_token_s_per_request * running
            running += 1
            open_[started] = [now, prompt, turn, running, factor, 0.0]
            active.append([factor * (first + TRUTH.token_s + TRUTH.token_s_per_request * (running - 1)), turn, started])
            started += 1
        until = min([0.002 + now, *(arrivals[:1] if arrivals and arrivals[0] > now else [])])
        for one in [*active]:
            open_[int(one[2])][5] += running * (until - now)
            one[0] -= until - now
            while one[0] <= 0 and one[1] > 0:
                one[1] -= 1
                one[0] += open_[int(one[2])][4] * (TRUTH.token_s + TRUTH.token_s_per_request * (running - 1))
            if one[1] == 0:
                active.remove(one)
                running -= 1
                began, prompt_tokens, tokens, at_start, _, integral = open_.pop(int(one[2]))
                mean = integral / (until - began)
                records.append(
                    RequestRecord(
                        began, until - began, 0.0, int(prompt_tokens), 0, int(tokens), int(at_start), mean, "stop"
                    )
                )
                heapq.heappush(arrivals, until + source.expovariate(2.0))
        now = until
    return records


def two_servers(jitter: float = 0.0) -> list[list[RequestRecord]]:
    return [served(200, 2, jitter), served(400, 8, jitter, seed=1)]


def test_the_settings_of_an_engine_are_found_again() -> None:
    found = fit_records(two_servers(), "run", "a test", {})
    for name in ("first_token_s_per_1k", "token_s", "token_s_per_request", "stall_s_per_1k"):
        assert found.settings[name] == pytest.approx(getattr(TRUTH, name), rel=0.1), name
    assert found.median_error < 0.02 and abs(found.throughput_error) < 0.02
    assert found.held_out + 400 < found.requests == 600


def test_the_spread_of_requests_is_found_too_and_a_few_outliers_change_nothing() -> None:
    late = [
        [msgspec.structs.replace(r, seconds=20 * r.seconds) if i % 50 == 0 else r for i, r in enumerate(records)]
        for records in two_servers(jitter=0.15)
    ]
    found = fit_records(late, "run", "a test", {})
    assert found.settings["jitter"] == pytest.approx(0.15, rel=0.3)
    assert found.settings["token_s"] == pytest.approx(TRUTH.token_s, rel=0.2)
    assert found.median_error < 0.2


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (served(40, 4), "has 40 requests that ended by themselves, a fit needs 100 at least: record a longer run"),
        (served(150, 1), "requests at once.*rollout.run_slots"),
        (served(150, 4, even="prompts"), "300 to 300 uncached prompt tokens.*bench=mixed"),
        (served(150, 4, even="turns"), "50 to 50 generated tokens.*max_turn_tokens"),
        ([], "has 0 requests"),
    ],
)
def test_what_tells_too_little_is_refused(records: list[RequestRecord], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)some run.*{words}"):
        fit_records([records], "some run", "a test", {})


def test_what_always_grows_together_is_refused() -> None:
    # Turns exactly as long as prompts, at a load that never changes within a request.
    records = [
        RequestRecord(
            10.0 * i, 1.0 + i % 7, 0.0, 100 * (1 + i % 7), 0, 100 * (1 + i % 7), 1 + i % 3, 1.0 + i % 3, "stop"
        )
        for i in range(200)
    ]
    with pytest.raises(ConfigError, match="first_token_s_per_1k and token_s cannot be told apart"):
        fit_records([records], "run", "a test", {})


def test_non_negative_least_squares_is_the_best_that_is_not_negative() -> None:
    source = np.random.default_rng(0)
    features, wanted = source.normal(size=(50, 4)), source.normal(size=50)
    best = non_negative_least_squares(features, wanted)
    assert (best >= 0).all() and (best == 0).any()
    error = np.sum((features @ best - wanted) ** 2)
    for _ in range(200):
        other = np.maximum(0.0, best + source.normal(scale=0.05, size=4))
        assert np.sum((features @ other - wanted) ** 2) >= error


def recorded_run(directory: Path) -> RunDirectory:
    """Of two servers; of each prompt 64 tokens came from the cache."""
    config = ProrlConfig()
    config.run.root, config.engine.kind, config.engine.threads = str(directory / "runs"), "vllm", 2
    config.model.name = "some-model"
    run = RunDirectory.create(config)
    run.requests.mkdir()
    for server, records in enumerate(two_servers()):
        cached = [msgspec.structs.replace(r, prompt_tokens=r.prompt_tokens + 64, cached_tokens=64) for r in records]
        lines = map(msgspec.json.encode, [ServedBy("vllm 9.9", "n1", 2), *cached])
        (run.requests / f"inference-{server}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return run


def test_a_fit_of_a_run_is_a_choice_of_the_group_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded_run(tmp_path)
    (run.logs / "inference-0-vllm.log").write_text("INFO [kv_cache_utils.py:1] GPU KV cache size: 23,456 tokens\n")
    found = fit(run.path)
    assert "vllm 9.9, some-model, a node of 2 CPUs, engine.threads=2" in found.source
    monkeypatch.setenv("PRORL_CONF_DIR", str(tmp_path / "conf"))
    (tmp_path / "conf").mkdir()
    write_fit(found, latency_file("mine"))
    config = compose(["latency=mine"])
    assert config.engine.kind == "scripted"
    settings = script_settings(config.engine.script)
    assert (settings.cache_tokens, settings.block_size) == (23_456, ProrlConfig().engine.block_size)
    assert settings.token_s == pytest.approx(TRUTH.token_s, rel=0.1)
    assert found.source in found.text() and "were held out" in found.text()


def test_a_cache_whose_size_is_not_told_is_noted(tmp_path: Path) -> None:
    found = fit(recorded_run(tmp_path).path)
    assert found.settings["cache_tokens"] == max(sum(r.prompt_tokens + 64 for r in one) for one in two_servers())
    assert "does not tell the size of its prefix cache" in found.text()


def test_a_run_without_records_is_told_how_to_make_them(tmp_path: Path) -> None:
    config = ProrlConfig()
    config.run.root = str(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.record_requests=true"):
        fit(RunDirectory.create(config).path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../mine", "letters, digits"),
        ("a" * 300, "100 at most"),
        ("mine.yaml", "give --name mine"),
        ("inf", "no name to YAML, but a number; give another --name, such as --name fit-inf"),
        ("1", "but a number"),
        ("1e5", "but a number"),
        ("True", "but true or false"),
        ("null", "but null"),
    ],
)
def test_a_name_that_latency_could_not_choose_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be the name of a latency model.*{why}"):
        latency_file(name)


def test_a_model_lies_where_every_launch_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRORL_CONF_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = LatencyFit({"token_s": 0.02, "fitted": "x"}, "x", 400, 100, 0.081, 0.305, -0.02)
    write_fit(found, latency_file("7b-fit.v2"))
    assert compose(["latency=7b-fit.v2"]).engine.script["token_s"] == 0.02
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: "):
        write_fit(found, tmp_path / "file" / "mine.yaml")


def test_what_the_requests_tell_only_roughly_is_said() -> None:
    assert "told only roughly" not in fit_records(two_servers(), "run", "a test", {}).text()
    few = [served(60, 2, 0.3), served(60, 8, 0.3, seed=1)]
    assert "first_token_s" in fit_records(few, "run", "a test", {}).text().partition("told only roughly")[2]


@pytest.mark.parametrize("spread", [1.5, 3.0])
def test_times_that_follow_from_nothing_are_no_model(spread: float) -> None:
    source = random.Random(0)
    wild = [
        [msgspec.structs.replace(r, seconds=source.lognormvariate(0.0, spread)) for r in one] for one in two_servers()
    ]
    with pytest.raises(ConfigError, match=r"run: half of the requests that were held out.*record anew"):
        fit_records(wild, "run", "a test", {})


def test_times_that_no_engine_has_are_no_model() -> None:
    slow = [[msgspec.structs.replace(r, seconds=1e6 * r.seconds) for r in one] for one in two_servers()]
    with pytest.raises(ConfigError, match=r"no model of an engine: engine\.script\..*an hour"):
        fit_records(slow, "run", "a test", {})


def test_what_the_end_of_an_agent_cut_off_is_left_out_and_told(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    path = run.requests / "inference-1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert "requests/inference-1.jsonl, line 401: left out" in fit(run.path).text()
    path.write_bytes(path.read_bytes()[:-20].replace(b'"seconds":', b'"seconds":-', 1))
    with pytest.raises(ConfigError, match=r"inference-1\.jsonl, line 2: not the record"):
        fit(run.path)


def test_latency_models_that_are_shipped_are_good_settings_and_say_their_source() -> None:
    for path in (conf_dir() / "latency").glob("*.yaml"):
        settings = script_settings(compose([f"latency={path.stem}"]).engine.script)
        assert settings.fitted and settings.token_s > 0, path
        assert "held out" in path.read_text(), path


def test_a_fit_says_its_numbers() -> None:
    found = LatencyFit({"token_s": 0.02, "fitted": "x"}, "x", 400, 100, 0.081, 0.305, -0.02)
    assert "each token 0.02 s" in found.text()
    assert "within 8.1%" in found.text() and "30.5%" in found.text() and "-2.0%" in found.text()


def test_the_latency_models_that_are_shipped_say_where_they_are_from() -> None:
    shipped = sorted((conf_dir() / "latency").glob("*.yaml"))
    assert shipped
    for path in shipped:
        engine = compose([f"latency={path.stem}"]).engine
        settings = script_settings(engine.script)
        assert engine.kind == "scripted" and settings.fitted and settings.token_s > 0 and settings.cache_tokens > 0
        assert "were held out: half of them are predicted within" in path.read_text()
