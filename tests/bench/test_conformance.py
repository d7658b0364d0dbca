"""The trainer against the numbers of verl and TRL, and the bench that says so."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from prorl_hpc.bench import conformance
from prorl_hpc.bench.conformance import GOAL, Case, deviations, fixtures, relative_error
from prorl_hpc.bench.figures import Figure

CASES = [pytest.param(case, id=f"{peer}: {case.name}") for peer in conformance.PARTS for case in fixtures(peer).cases]


@pytest.mark.parametrize("case", CASES)
def test_case(case: Case) -> None:
    for dtype in ("float32", "float64"):
        found = deviations(case, dtype)
        assert found and all(d.error <= GOAL for d in found), (dtype, found)


@pytest.mark.parametrize("setting", ["clip_low", "clip_high", "dual_clip", "correction_cap", "kl_coefficient"])
def test_the_cases_would_notice_another_setting(setting: str) -> None:
    with_it = [case.values[0] for case in CASES if case.values[0].settings.get(setting)]
    assert any(_deviates(case, setting, case.settings[setting] * 1.3) for case in with_it)


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("policy_loss", "cispo"),
        ("aggregation", "seq_mean_token_sum"),
        ("correction", "none"),
        ("entropy_coefficient", 0.5),
        ("value_coefficient", 0.1),
        ("value_clip", 0.05),
        ("advantage", "group_mean"),
        ("gae_lambda", 0.5),
        ("soft_overlong_cache_tokens", 30),
    ],
)
def test_the_cases_would_notice_another_choice(setting: str, other: object) -> None:
    assert any(_deviates(case.values[0], setting, other) for case in CASES if setting in case.values[0].settings)


def _deviates(case: Case, setting: str, value: object) -> bool:
    changed = msgspec.structs.replace(case, settings=case.settings | {setting: value})
    return any(d.error > 100 * GOAL for d in deviations(changed, "float64"))


def test_there_is_a_case_for_every_loss_correction_and_aggregation() -> None:
    seen = [case.values[0].settings for case in CASES]
    for setting, count in (("policy_loss", 3), ("aggregation", 4), ("correction", 4), ("advantage", 4)):
        assert len({settings[setting] for settings in seen if setting in settings}) == count


def test_relative_error() -> None:
    assert relative_error([1.0, 2.0], [1.0, 2.02]) == pytest.approx(0.02 / 2.02)
    assert relative_error({"a": [[0.0]], "b": 3.0}, {"a": [[0.0]], "b": 3.0}) == 0.0
    assert relative_error([1.0], [1.0, 2.0]) == math.inf
    assert relative_error([math.nan], [1.0]) == math.inf
    assert relative_error([1.0, 1.0], [1.0, math.nan]) == math.inf
    assert relative_error({"a": [1.0]}, {}) == relative_error({"a": [1.0]}, {"b": [1.0]}) == math.inf
    assert relative_error([], []) == math.inf
    assert relative_error([1e-9, 1.0], [0.0, 1.0]) == pytest.approx(1e-6)


def test_the_bench_has_a_figure_for_each_quantity(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = conformance.measure(list(conformance.PARTS), True, lambda words: None)
    assert {f.name for f in figures} == {
        *(f"verl: {q}" for q in ("cases", "losses", "gradients", "advantages", "returns")),
        *(f"trl: {q}" for q in ("cases", "losses", "gradients", "length penalties")),
    }
    assert all(f.holds for f in figures)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (without,) = conformance.measure(["trl"], True, lambda words: None)
    assert without.value is None and "torch is not installed" in without.detail


def damaged(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Case]], object]) -> list[Figure]:
    known = fixtures("trl")
    cases = copy.deepcopy(known.cases)
    change(cases)
    monkeypatch.setattr(conformance, "fixtures", lambda peer: msgspec.structs.replace(known, cases=cases))
    return conformance.measure(["trl"], True, lambda words: None)


@pytest.mark.parametrize(
    "change",
    [
        lambda cases: cases.clear(),
        lambda cases: cases.pop(),
        lambda cases: cases.append(cases[0]) or cases.pop(1),
        lambda cases: cases[3].expected.clear(),
        lambda cases: cases[3].expected["gradients"].clear(),
        lambda cases: cases[3].expected.pop("gradients"),
        lambda cases: cases[3].expected.update(loss=math.nan),
        lambda cases: cases[3].expected["gradients"]["logprobs"][0].__setitem__(0, math.nan),
        lambda cases: cases[3].expected["gradients"]["logprobs"].pop(),
        lambda cases: cases[3].inputs.pop("mask"),
        lambda cases: cases.__setitem__(3, msgspec.structs.replace(cases[3], kind="foo")),
    ],
)
def test_damaged_fixtures_do_not_pass(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Case]], object]) -> None:
    figures = damaged(monkeypatch, change)
    assert figures and not all(figure.holds for figure in figures)


def test_a_case_of_no_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (figure,) = damaged(monkeypatch, lambda c: c.__setitem__(3, msgspec.structs.replace(c[3], kind="foo")))
    assert (
        f"case {fixtures.__wrapped__('trl').cases[3].name!r} of the fixtures is damaged: it is of kind 'foo'"
        in figure.detail
    )


def test_the_command_answers_in_json() -> None:
    words = [sys.executable, "-m", "prorl_hpc", "bench", "conformance", "--quick", "--part", "trl", "--json"]
    done = subprocess.run(words, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert all(figure["holds"] for figure in json.loads(done.stdout)["figures"])
