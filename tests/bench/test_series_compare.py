"""Series and runs side by side."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scaling_points import Shape, done, failed, series_of, spec

from prorl_hpc.bench.scaling_records import SERIES_FILE, PointResult, point_file
from prorl_hpc.bench.series_compare import RUN, compare
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.store import compose
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError


def series_in(folder: Path, *results: PointResult) -> Path:
    (folder / "points").mkdir(parents=True)
    write_json(folder / SERIES_FILE, series_of(*results))
    for result in results:
        write_json(point_file(folder, result.spec.name), result)
    return folder


def test_ratios_are_to_the_first(tmp_path: Path) -> None:
    before = series_in(tmp_path / "before", done(spec(1)), done(spec(2)))
    after = series_in(tmp_path / "after", done(spec(1), Shape(per_node=0.15)), done(spec(2), Shape(per_node=0.12)))
    found = compare([before, after])
    lines = {(line.point, line.figure): line for line in found.lines}
    assert lines["nodes-1", "rollouts/s"].ratios == [pytest.approx(1.5)]
    assert lines["nodes-2", "efficiency"].values == [pytest.approx(1.0), pytest.approx(0.8)]
    assert not found.differences
    assert "| nodes-1 | rollouts/s | 0.1 /s | 0.15 /s | 1.500 |" in found.markdown()
    assert found.table().row_count == len(found.lines)


def test_what_differs_or_failed_is_said(tmp_path: Path) -> None:
    before = series_in(tmp_path / "a", done(spec(1)), done(spec(2)))
    after = series_in(tmp_path / "b", done(spec(1, rollouts=50)), failed(spec(2)), done(spec(4)))
    words = "\n".join(compare([before, after]).differences)
    assert "nodes-1: not the same load: a: 30 rollouts; b: 50 rollouts" in words
    assert "nodes-2: b has no figures: failed: its worker ended" in words
    assert "nodes-4: not in a" in words


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = series_in(tmp_path / "one", done(spec(1)))
    with pytest.raises(ConfigError, match="two or more"):
        compare([one])
    with pytest.raises(ConfigError, match="named twice"):
        compare([one, one])
    with pytest.raises(ConfigError, match="neither the folder of a series"):
        compare([one, tmp_path])
    other = series_in(tmp_path / "other", done(spec(8)))
    with pytest.raises(ConfigError, match="one: nodes-1; other: nodes-8"):
        compare([one, other])


def test_a_point_that_failed_is_told_where_nothing_is_left_to_compare(tmp_path: Path) -> None:
    one, other = series_in(tmp_path / "f1", failed(spec(1))), series_in(tmp_path / "good", done(spec(1)))
    with pytest.raises(ConfigError, match=r"f1: nodes-1 has no figures \(failed: its worker ended\); good: nodes-1\)"):
        compare([one, other])


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = [series_in(tmp_path / name / "out", done(spec(1))) for name in ("x", "y")]
    assert [side.label for side in compare(paths).sides] == ["x/out", "y/out"]


def test_runs_by_their_rollouts(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from prorl_hpc.observe.rollout_store import SCHEMA

    empty = {name: [] for name in SCHEMA.names if pa.types.is_list(SCHEMA.field(name).type)}
    runs = []
    for seconds in (10.0, 20.0):
        config = compose(["engine=scripted", f"run.root={tmp_path}", f"rollout.run_slots={seconds:.0f}"])
        run = RunDirectory.create(config)
        rows = [
            {**empty, "rollout_id": f"b0.g0.s{n}", "batch_id": "b0", "batch_elapsed_s": seconds, "status": "done",
             "metrics": [], "timings": [{"stage": "run", "queued_s": 1.0, "busy_s": 2.0}]}
            for n in range(5)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), run.rollouts / "b0.parquet")
        runs.append(run.path)
    found = compare(runs)
    lines = {line.figure: line for line in found.lines if line.point == RUN}
    assert lines["rollouts/s"].values == [0.5, 0.25]
    assert lines["time to a batch"].ratios == [2.0]
    assert lines["wait for RUN"].values == [1.0, 1.0]
    assert any("not the same rollout.run_slots:" in words and ": 10; " in words for words in found.differences)


def test_of_short_times_the_difference_is_told(tmp_path: Path) -> None:
    def lasting(tool_call_s: float) -> PointResult:
        point = done(spec(1))
        return msgspec.structs.replace(point, figures=msgspec.structs.replace(point.figures, tool_call_s=tool_call_s))

    found = compare([series_in(tmp_path / str(ms), lasting(ms / 1000)) for ms in (1, 8, 400)])
    assert "| nodes-1 | tool call beyond its sleep | 1 ms | 8 ms | 0.4 s | +7 ms | +0.399 s |" in found.markdown()
    assert next(line.ratios for line in found.lines if line.figure == "tool call beyond its sleep") == [None, None]


def test_commits_and_settings_that_differ_are_told_one_a_line(tmp_path: Path) -> None:
    def at(commit: str, *words: str) -> PointResult:
        point = done(msgspec.structs.replace(spec(1), overrides=["nodes=1", *words]))
        return msgspec.structs.replace(point, commit=commit)

    a = series_in(tmp_path / "a", at("abc", "rollout.run_slots=4", "+x.y=1"))
    b = series_in(tmp_path / "b", at("def", "rollout.run_slots=8"))
    assert compare([a, b]).differences == [
        "nodes-1: not the same rollout.run_slots: a: 4; b: 8",
        "nodes-1: not the same x.y: a: 1; b: not given",
        "nodes-1: not the same commit: a: abc; b: def",
    ]
    unknown = series_in(tmp_path / "c", at("", "rollout.run_slots=8"))
    assert not compare([b, unknown]).differences
