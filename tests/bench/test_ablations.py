"""Ablations as points of a series, and what they come to."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from prorl_hpc.bench.ablation_table import ABLATIONS, balancing
from prorl_hpc.bench.ablations import ablation_figures, ablation_points
from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.freed_engines import freed_s
from prorl_hpc.bench.scaling_records import BatchNote, GaugeSample, LoadRecord, PointResult, PointState
from prorl_hpc.bench.series_launch import point_words
from prorl_hpc.cli.composition import compose_all
from prorl_hpc.config.store import compose
from prorl_hpc.messages.batch import Refill
from prorl_hpc.messages.errors import ConfigError
from tests.bench.scaling_points import done, failed

SWITCHES = {
    "balancing": {"rollout.balancing"},
    "shell": {"sandbox.shell"},
    "cleanup": {"rollout.abort_cancelled"},
    "pools": {"rollout.coupled"},
    "batch": set(),
    "ready": {"rollout.ready_slots"},
}


def switched(name: str) -> set[str]:
    """Settings in which the variants of an ablation differ."""
    words = [set(point.overrides) for point in ablation_points([name], 1, ["engine=scripted"])]
    return {word.partition("=")[0] for some in words for word in some if not all(word in other for other in words)}


@pytest.mark.parametrize("name", ABLATIONS)
def test_variants_differ_by_the_switch_alone(name: str) -> None:
    assert switched(name) == SWITCHES[name]


def test_the_batch_ablation_differs_by_what_is_ordered() -> None:
    loads = {point.variant: point.load for point in ablation_points(["batch"], 1)}
    ours, others = loads["asynchronous"], loads["synchronous"]
    assert (ours.refill, others.refill) == (Refill.AT_ONCE, Refill.IN_ROUNDS)
    changed = replace(
        others, refill=ours.refill, when_full=ours.when_full, max_parallel_groups=ours.max_parallel_groups
    )
    assert changed == ours


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_point_is_a_configuration(name: str, tmp_path: Path) -> None:
    for point in ablation_points([name], 2, ["engine=scripted"]):
        (composed,) = compose_all(point_words(point, "local", tmp_path))
        assert composed.config.task.options["kinds"]


def test_without_vllm_balancing_is_measured_with_a_scripted_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ABLATIONS, "balancing", balancing(real=False))
    point = ablation_points(["balancing"], 1)[0]
    (composed,) = compose_all(point_words(point, "local", tmp_path))
    assert (composed.config.engine.kind, composed.config.engine.script["cache_tokens"]) == ("scripted", 60000)


def test_names_are_unique_and_all_is_all() -> None:
    names = [point.name for point in ablation_points(["all"], 1)]
    assert len(set(names)) == len(names)
    assert {point.series for point in ablation_points(["all"], 1)} == set(ABLATIONS)


def test_more_nodes_get_more_work() -> None:
    one, four = (ablation_points(["pools"], nodes)[0] for nodes in (1, 4))
    assert four.load.rollouts == 4 * one.load.rollouts
    one, four = (ablation_points(["batch"], nodes)[0] for nodes in (1, 4))
    assert (four.load.groups, four.load.batches) == (4 * one.load.groups, one.load.batches)


def test_quick_is_less() -> None:
    pairs = zip(ablation_points(["all"], 1), ablation_points(["all"], 1, quick=True), strict=True)
    assert all((q.load.rollouts, q.load.batches) < (p.load.rollouts, p.load.batches) for p, q in pairs)


def test_what_the_series_says_holds_over_the_workload_but_the_switch_is_the_ablations() -> None:
    stages, coupled = ablation_points(["pools"], 1, ["rollout.run_slots=2"])
    assert "rollout.run_slots=2" in stages.overrides and "rollout.run_slots=2" in coupled.overrides
    assert "rollout.coupled=true" in coupled.overrides
    with pytest.raises(ConfigError, match=r"rollout\.coupled=false: ablate=pools measures .*leave it out"):
        ablation_points(["all"], 1, ["rollout.coupled=false"])
    assert ablation_points(["shell"], 1, ["rollout.coupled=false"])


def test_another_engine_gets_no_script() -> None:
    words = ablation_points(["pools"], 1, ["engine=vllm"])[0].overrides
    assert not [word for word in words if "engine.script" in word]
    assert [word for word in ablation_points(["pools"], 1, ["engine=scripted"])[0].overrides if "engine.script" in word]


def test_an_engine_that_the_series_chooses_holds_for_every_ablation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ABLATIONS, "balancing", balancing(real=True))
    words = ablation_points(["balancing"], 1, ["engine=vllm", "model=path", "model.path=/a/model"])[1].overrides
    assert "model=path" in words and not {"model=smollm2", "engine.threads=1"} & set(words)
    assert "model=smollm2" in ablation_points(["balancing"], 1)[1].overrides
    shipped = compose(["latency=smollm2-2cores"]).engine.script
    for point in ablation_points(["all"], 1, ["latency=smollm2-2cores"]):
        (composed,) = compose_all(point_words(point, "local", tmp_path))
        script = composed.config.engine.script
        assert composed.config.engine.kind == "scripted"
        assert {name: script[name] for name in shipped} == shipped
        assert script["reply_min_tokens"] == 1_000_000


def test_a_wrong_name_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"ablate=pool: .*Did you mean pools\?.*balancing"):
        ablation_points(["pool"], 1)
    with pytest.raises(ConfigError, match="ablate=everything"):
        ablation_points(["pools", "everything"], 1)


def result(name: str, variant: str, **figures: object) -> PointResult:
    point = next(p for p in ablation_points([name], 1) if p.variant == variant)
    made = done(point)
    assert made.figures is not None
    return replace(made, figures=replace(made.figures, **figures))


def figure(figures: list[Figure], words: str, against: str = "") -> Figure:
    (found,) = [f for f in figures if words in f.name and against in f.against]
    return found


def test_a_rate_is_held_against_its_goal() -> None:
    figures = ablation_figures(
        [result("pools", "stages", steady_per_s=3.5), result("pools", "coupled", steady_per_s=1.0)]
    )
    (pools,) = figures
    assert (pools.value, pools.goal, pools.holds) == (3.5, ">= 3", True)
    assert "one coupled pool 1 rollouts/s" in pools.detail
    (pools,) = ablation_figures(
        [result("pools", "stages", steady_per_s=2.0), result("pools", "coupled", steady_per_s=1.0)]
    )
    assert pools.holds is False


def test_a_shorter_time_to_batch_is_a_gain_and_only_the_synchronous_one_is_judged() -> None:
    figures = ablation_figures(
        [
            result("batch", "asynchronous", batch_s=[5.0, 7.0]),
            result("batch", "synchronous", batch_s=[20.0, 22.0]),
            result("batch", "oversampled", batch_s=[9.0]),
        ]
    )
    judged, told = figure(figures, "informative", "as are wanted"), figure(figures, "informative", "spare")
    assert (judged.value, judged.holds) == (3.5, True)
    assert "80 minutes" in judged.detail
    assert "6 s (mean of 2: 5 to 7), " in judged.detail and "21 s (mean of 2: 20 to 22)" in judged.detail
    assert (told.value, told.goal, told.holds) == (1.5, "", None)


def test_hits_are_compared_by_points() -> None:
    figures = ablation_figures(
        [
            result("balancing", "sticky", turns_per_s=9.0, steady_per_s=1.0, per_s=1.0, prefix_hit_rate=0.8),
            result("balancing", "per-task", turns_per_s=8.0, steady_per_s=1.0, per_s=1.0, prefix_hit_rate=0.8),
            result("balancing", "per-request", turns_per_s=12.0, steady_per_s=2.0, per_s=1.0, prefix_hit_rate=0.5),
        ]
    )
    hits = figure(figures, "hits", "per request")
    assert hits.value == pytest.approx(30)
    assert (hits.unit, hits.holds) == ("points", True)
    assert figure(figures, "turns/s of the whole run", "per request").value == 1.5
    assert figure(figures, "turns/s of the whole run", "per rollout").holds is None


def test_hits_that_are_alike_to_the_digits_shown_are_no_difference() -> None:
    rest = {"turns_per_s": 9.0, "steady_per_s": 1.0, "per_s": 1.0}
    figures = ablation_figures(
        [
            result("balancing", "sticky", prefix_hit_rate=0.72031, **rest),
            result("balancing", "per-request", prefix_hit_rate=0.72034, **rest),
        ]
    )
    hits = figure(figures, "hits", "per request")
    assert (str(hits.value), hits.holds) == ("0.0", False)
    assert "72.03 %, " in hits.detail and "no difference" in hits.detail


def test_freed_engines_are_judged_of_ours_alone() -> None:
    figures = ablation_figures(
        [
            result("cleanup", "on", batch_s=[5.0], freed_s=[0.2, 0.4]),
            result("cleanup", "off", batch_s=[6.0], freed_s=[2.0]),
        ]
    )
    ours, other = figure(figures, "stopped at once"), figure(figures, "runs to its end")
    assert (ours.value, ours.holds) == (0.4, True)
    assert (other.value, other.holds) == (2.0, None)
    assert figure(figures, "time to a batch").value == 1.2


def test_what_is_missing_or_failed_is_told() -> None:
    stages, coupled = ablation_points(["pools"], 1)
    (missing,) = ablation_figures([done(stages)])
    assert (missing.value, missing.holds) == (None, None)
    assert "one coupled pool: not measured" in missing.detail
    (broken,) = ablation_figures([done(stages), failed(coupled, PointState.TIMED_OUT, "after 15 minutes")])
    assert "timed out: after 15 minutes" in broken.detail
    (nothing,) = ablation_figures([result("pools", "stages", steady_per_s=0.0), done(coupled)])
    assert nothing.value is None
    assert "too few rollouts" in nothing.detail
    assert ablation_figures([]) == []


def record(*samples: tuple[float, int]) -> LoadRecord:
    """Two batches, full at 10 and 20."""
    notes = [BatchNote(5.0, 4, 0, 8, ended) for ended in (10.0, 20.0)]
    gauges = [GaugeSample(at, {}, {"a": running, "b": 0}, {"a": 0, "b": 0}) for at, running in samples]
    return LoadRecord(5.0, 22.0, {}, notes, 0.0, gauges, {})


def test_engines_are_free_when_they_stay_so() -> None:
    found = record((9.9, 3), (10.1, 0), (10.3, 1), (10.5, 0), (11.5, 0), (20.5, 4))
    assert freed_s(found, 2.0) == pytest.approx([0.5])


def test_engines_that_stay_at_work_count_with_the_whole_break() -> None:
    assert freed_s(record((10.5, 3), (11.9, 1), (12.1, 0)), 2.0) == [2.0]


def test_without_a_break_nothing_can_be_told() -> None:
    assert freed_s(record((10.5, 0)), 0.0) == []
    assert freed_s(record((13.0, 0)), 2.0) == []
