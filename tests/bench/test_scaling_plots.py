"""The plots of a series: what is drawn, and the form of the files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scaling_points import Shape, done, failed, spec

from prorl_hpc.bench.scaling_bars import draw_batches, draw_busy, draw_utilisation, draw_waits
from prorl_hpc.bench.scaling_paper import EFFICIENCY
from prorl_hpc.bench.scaling_plots import draw_plots, draw_scaling
from prorl_hpc.bench.scaling_records import LoadOrder, PointResult, PointState, Times
from prorl_hpc.bench.scaling_simulated import Check, Coordinator, SimulatedPoint, SimulatedSeries


def simulated(*points: tuple[int, float], valid: bool = True) -> SimulatedSeries:
    found = [SimulatedPoint(nodes, 30 * nodes, 0.1 * nodes * share, share, {}, {}, 0.1) for nodes, share in points]
    checks = [Check("nodes-1", 1, 0.1, 0.1, 0.1)]
    return SimulatedSeries(["nodes-1"], 1, Coordinator(0.0, 0.0, ""), checks, found, valid, "", "")


def batches(variant: str, *seconds: float) -> PointResult:
    point = msgspec.structs.replace(spec(1, "batch", variant), load=LoadOrder(batches=3))
    return done(point, Shape(batch_s=seconds)) if seconds else failed(point)


SERIES = [done(spec(1)), done(spec(2)), failed(spec(4), PointState.TIMED_OUT), done(spec(8), Shape(per_node=0.09))]


def test_rates_with_the_ideal_and_a_failed_point_that_is_seen() -> None:
    figure = draw_scaling(SERIES, None)
    assert figure is not None
    rates, shares = figure.axes
    lines = {line.get_label(): line for line in rates.get_lines()}
    assert list(lines["ideal"].get_ydata()) == pytest.approx([0.1, 0.8])
    assert list(lines["measured"].get_ydata()) == pytest.approx([0.1, 0.2, float("nan"), 0.72], nan_ok=True)
    assert list(lines["without a rate"].get_xdata()) == [4]
    assert "timed out" in [text.get_text() for text in rates.texts]
    lines = {line.get_label(): line for line in shares.get_lines()}
    assert lines["measured"].get_ydata()[-1] == pytest.approx(0.9)
    assert list(lines["ProRL Agent's chart (14B on GPUs)"].get_ydata()) == list(EFFICIENCY.values())
    assert rates.get_ylim()[0] == shares.get_ylim()[0] == 0
    assert (rates.get_xlabel(), rates.get_ylabel()) == ("nodes", "rollouts/s (steady)")
    assert "scripted" in figure.get_suptitle()


def test_a_single_point_stands_in_the_middle_and_lines_beside_it_are_no_stubs() -> None:
    figure = draw_scaling([done(spec(1))], None)
    assert figure is not None
    rates, shares = figure.axes
    lines = {line.get_label(): line for line in [*rates.get_lines(), *shares.get_lines()]}
    assert list(lines["ProRL Agent's chart (14B on GPUs)"].get_xdata()) == [1, 2]
    assert {line.get_label(): line for line in rates.get_lines()}["ideal"].get_xdata()[-1] == 2
    for axes in (rates, shares):
        assert axes.get_xlim() == pytest.approx((0, 2.16))
    large = draw_scaling([done(spec(64))], None)
    assert large is not None
    assert "ProRL Agent's chart (14B on GPUs)" not in {line.get_label() for line in large.axes[1].get_lines()}


def test_the_simulated_part_is_drawn_apart_and_named_when_it_is_not_valid() -> None:
    figure = draw_scaling(SERIES, simulated((64, 0.99), (4096, 0.9)))
    assert figure is not None
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines["simulated"].get_xdata()) == [64, 4096]
    assert lines["simulated"].get_markerfacecolor() == "none"
    assert max(lines["measured"].get_xdata()) == 8
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    wrong = draw_scaling(SERIES, simulated((64, 0.99), valid=False))
    assert wrong is not None
    assert any("NOT VALID" in str(line.get_label()) for line in wrong.axes[0].get_lines())


def test_bars_keep_the_place_of_a_failed_point() -> None:
    for figure in (draw_utilisation(SERIES), draw_busy(SERIES), draw_waits(SERIES)):
        assert figure is not None
        for axes in figure.axes:
            assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8"]
            assert "timed out" in [text.get_text() for text in axes.texts]
    use = draw_utilisation(SERIES)
    assert use is not None
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in use.axes[0].containers}
    assert heights["RUN"] == pytest.approx([97, 97, 97])


def test_batches_of_all_points_with_their_means() -> None:
    figure = draw_batches([*SERIES, batches("asynchronous", 10, 12, 14), batches("synchronous", 30), batches("x")])
    assert figure is not None
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines["a batch"].get_ydata()) == [10, 12, 14, 30]
    assert list(lines["mean"].get_ydata()) == [12, 30]
    assert "failed" in [text.get_text() for text in figure.axes[0].texts]
    assert len(set(lines["a batch"].get_xdata()[:3])) == 3
    assert "12.0 s" in [text.get_text() for text in figure.axes[0].texts]


def test_no_empty_plot(tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    drawn = draw_plots(folder, [done(spec(1))], None)
    assert set(drawn) == {"scaling", "utilisation", "waits", "busy"}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    svg = (folder / "scaling.svg").read_text()
    assert "rollouts/s (steady)" in svg and "<dc:date>" not in svg
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")
    (folder / "batches.png").write_bytes(b"of a series before")
    assert set(draw_plots(folder, [failed(spec(1))], None)) == {"scaling"}
    assert {path.name for path in folder.iterdir()} == {"scaling.png", "scaling.svg"}
    assert draw_plots(folder, [], None) == {} and not list(folder.iterdir())


def test_waits_of_nothing_are_not_drawn_large() -> None:
    point = done(spec(1))
    none = msgspec.structs.replace(point.figures, waits={**point.figures.waits, "eval": Times(0, 0, 0)})
    figure = draw_waits([msgspec.structs.replace(point, figures=none)])
    assert figure is not None
    before_eval = figure.axes[2]
    assert before_eval.get_ylim() == (0, 1) and "no wait" in [text.get_text() for text in before_eval.texts]
    assert "4.0" in [text.get_text() for text in figure.axes[1].texts]


def test_errors_are_drawn_and_the_ticks_can_be_read() -> None:
    points = [msgspec.structs.replace(p, figures=msgspec.structs.replace(p.figures, steady_error=0.1))
              for p in (done(spec(1)), done(spec(8)))]  # fmt: skip
    figure = draw_scaling(points, simulated((64, 0.99)))
    assert figure is not None
    rates, shares = figure.axes
    assert [len(axes.containers) for axes in (rates, shares)] == [1, 1]
    assert list(rates.get_xticks()) == [1, 2, 4, 8, 64]
    drawn = [line for line in rates.get_lines() if not str(line.get_label()).startswith("_")]
    assert [len(list(line.get_xdata())) for line in drawn] == [
        2,
        2,
        1,
    ]  # ideal and measured; nothing leads on to the simulated
    least, most = rates.get_ylim()
    ticks = [tick for tick in rates.get_yticks() if least <= tick <= most]
    assert len(ticks) >= 5
    assert rates.yaxis.get_major_formatter()(0.2, 0) == "0.2" and rates.yaxis.get_major_formatter()(1000, 0) == "1,000"
