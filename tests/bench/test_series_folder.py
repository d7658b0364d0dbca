"""The folder of a series: who may be at it, what becomes of damaged files, and that no rollout is lost from it."""

from __future__ import annotations

import errno
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from scaling_points import Shape, done, failed, series_of, spec

from prorl_hpc.__main__ import main
from prorl_hpc.bench import series_results
from prorl_hpc.bench.disk_errors import told
from prorl_hpc.bench.figures import Machine
from prorl_hpc.bench.point_measures import ROLLOUT_SCHEMA
from prorl_hpc.bench.scaling_records import RESULTS_FILE, SERIES_FILE, PointResult, PointState, point_file
from prorl_hpc.bench.scaling_report import simulated_before, write_report
from prorl_hpc.bench.scaling_simulated import Check, Coordinator, SimulatedSeries
from prorl_hpc.bench.series import SeriesRun
from prorl_hpc.bench.series_folder import LOCK_FILE, only_here, read_series, run_note
from prorl_hpc.bench.series_results import write_results
from prorl_hpc.config.run_lock import RunLocked
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError, RunError

GARBAGE = {"empty": b"", "binary": bytes(range(256)), "an object": b"{}", "cut": b'{"command":["a"],"pla'}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a series with one point that is done and one that failed; their runs are gone."""
    folder = tmp_path / "series"
    (folder / "points").mkdir(parents=True)
    results = [done(spec(1), Shape(run_dir=str(folder / "runs" / "nodes-1-abc"))), failed(spec(2))]
    write_json(folder / SERIES_FILE, series_of(*results))
    for result in results:
        write_json(point_file(folder, result.spec.name), result)
    return folder


def test_results_of_an_earlier_version_stay(tmp_path: Path) -> None:
    old = series_results.pa.table({"point": ["nodes-1"], "rollout_id": ["r"]})
    pq.write_table(old, tmp_path / RESULTS_FILE)
    write_results(tmp_path, [done(spec(1))], lambda words: None)
    assert pq.read_table(tmp_path / RESULTS_FILE)["rollout_id"].to_pylist() == ["r"]


def rows(result: PointResult, count: int) -> series_results.pa.Table:
    row = {"point": result.spec.name, "nodes": result.spec.nodes, "rollout_id": "r"}
    return series_results.pa.Table.from_pylist([row] * count, schema=ROLLOUT_SCHEMA)


def test_rows_of_a_run_that_is_gone_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, said = {"nodes-1": 4, "nodes-2": 8}, list[str]()
    monkeypatch.setattr(series_results, "rollout_table", lambda r: rows(r[0], there[r[0].spec.name]))
    results = [done(spec(n), Shape(run_dir=f"/gone/nodes-{n}-abc")) for n in (1, 2)]
    write_results(tmp_path, results, said.append)
    there["nodes-1"] = 0
    write_results(tmp_path, results, said.append)
    assert pq.read_table(tmp_path / RESULTS_FILE).num_rows == 12
    assert "nodes-1: its run /gone/nodes-1-abc is gone. Its 4 rollouts stay in results.parquet" in said
    # measured again, into another run: the rows are that one's
    again = [done(spec(1), Shape(run_dir="/gone/nodes-1-def")), results[1]]
    write_results(tmp_path, again, said.append)
    assert pq.read_table(tmp_path / RESULTS_FILE).num_rows == 8


def test_rows_stay_where_the_run_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, said = done(spec(1), Shape(run_dir=str(tmp_path))), list[str]()
    monkeypatch.setattr(series_results, "rollout_table", lambda results: rows(results[0], 3))
    write_results(tmp_path, [result], said.append)
    monkeypatch.undo()
    (tmp_path / "bench_record.json").write_text("{}")
    write_results(tmp_path, [result], said.append)
    assert pq.read_table(tmp_path / RESULTS_FILE).num_rows == 3
    assert "bench_record.json cannot be read" in said[-1]


def test_results_that_cannot_be_read_are_put_aside(tmp_path: Path) -> None:
    (tmp_path / RESULTS_FILE).write_bytes(b"what was it")
    said = list[str]()
    write_results(tmp_path, [], said.append)
    assert (tmp_path / "results.parquet.damaged").read_bytes() == b"what was it"
    assert "cannot be read" in said[0]


def _hold(folder: Path, held: multiprocessing.synchronize.Event, end: multiprocessing.synchronize.Event) -> None:
    with only_here(folder):
        held.set()
        end.wait(30)


def test_one_command_at_a_time_is_at_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, context = tmp_path / "not" / "there", multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    first = context.Process(target=_hold, args=(folder, held, end))
    first.start()
    try:
        assert held.wait(30)
        assert main(["bench", "scaling", "--local", "nodes=1", f"out={folder}"]) == 2
        assert f"(process {first.pid} on" in capsys.readouterr().err
        with pytest.raises(RunLocked, match="wait until it is done, then go on with it"), only_here(folder):
            pass
        assert (folder / LOCK_FILE).exists()
    finally:
        end.set()
        first.join(30)
    assert list(tmp_path.iterdir()) == []  # no series came of it


def test_only_what_was_made_is_taken_away_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError), only_here(tmp_path):
        (tmp_path / ".model").mkdir()
        raise ConfigError("refused")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_told_to_end_before_anything_began_it_says_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    words = ["bench", "scaling", "--local", "nodes=1", "workload=math-like", f"out={folder}"]
    command = [sys.executable, "-m", "prorl_hpc", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (folder / LOCK_FILE).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        told_words = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "go on with" not in told_words
    assert "begun" in told_words
    assert not folder.exists()


@pytest.mark.parametrize("place", ["file", "file/x", "/proc/x", "/sys/x"])
def test_a_folder_that_cannot_be_made_is_one_sentence(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "scaling", "--local", "nodes=1", f"out={tmp_path / place}"]) == 2
    assert f"out={tmp_path / place} cannot be used" in capsys.readouterr().err


def test_bench_all_names_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "all", "--quick", "--out", str(tmp_path / "file")]) == 2
    assert f"--out {tmp_path / 'file'} cannot be used" in capsys.readouterr().err


def test_a_full_disk_is_told_as_that() -> None:
    with (
        pytest.raises(RunError, match=r"out=D cannot be written \(/d/f: No space left on device\): make room"),
        told("out=D"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/d/f")


def test_a_full_disk_leaves_nothing_of_a_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(directory: Path) -> Path:
        directory.mkdir()
        (directory / "tokenizer.json").touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(directory / "tokenizer.json"))

    monkeypatch.setattr("prorl_hpc.tasks.testing.write_chat_model", full)
    assert main(["bench", "scaling", "--local", "nodes=1", f"out={tmp_path / 'series'}"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_series_that_cannot_be_read_is_named(
    content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / SERIES_FILE).write_bytes(content)
    for words in (["report", str(folder)], ["scaling", f"out={folder}"], ["report", str(folder), str(folder.parent)]):
        assert main(["bench", *words]) == 2
        assert f"{folder / SERIES_FILE} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (b'{"command": [], "place": "moon", "points": []}', "place 'moon' is none"),
        (b'{"command": [], "place": "local", "points": []}', "there are no points in it"),
    ],
)
def test_a_series_of_no_place_or_points_is_an_error(content: bytes, answer: str, folder: Path) -> None:
    (folder / SERIES_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=answer):
        read_series(folder)


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_result_that_cannot_be_read_is_told_and_can_be_measured_again(
    content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point_file(folder, "nodes-1").write_bytes(content)
    assert main(["bench", "report", str(folder)]) == 1
    assert "points/nodes-1.json cannot be read" in (folder / "report.md").read_text()
    series, results = read_series(folder)
    assert [result.state for result in results] == [PointState.FAILED] * 2
    said = list[str]()
    again = SeriesRun(folder, series, said.append, again=True)
    assert [point.name for point in again._left] == ["nodes-1", "nodes-2"]
    assert SeriesRun(folder, series, said.append)._left == []
    assert "--again" in said[0]


def test_a_report_is_written_into_the_page_of_benchmarks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("before\n<!-- bench scaling -->\nstale\n<!-- end -->\nafter\n")
    main(["bench", "report", str(folder), "--write", str(page)])
    text = page.read_text()
    assert "| rate at 1 node |" in text and "stale" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert (tmp_path / "scaling-nodes.png").is_file()
    assert main(["bench", "report", str(folder), str(folder), "--write", str(page)]) == 2
    assert "--write is for one series" in capsys.readouterr().err


def test_what_was_simulated_stays_until_a_point_is_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series, results = read_series(folder)
    check = Check("nodes-1", 1, measured_per_s=1.0, foretold_per_s=1.0, replayed_per_s=1.0)
    coordinator = Coordinator(0.001, 0.0, "as it was told before")
    simulated = SimulatedSeries(["nodes-1"], 1, coordinator, [check], [], valid=True, why="", conclusion="no end")
    write_report(folder, series, results, simulated)
    main(["bench", "report", str(folder)])
    assert simulated_before(folder, results) == simulated
    assert "as it was told before" in (folder / "report.md").read_text()
    point_file(folder, "nodes-1").unlink()
    main(["bench", "report", str(folder)])
    assert "Simulated" not in (folder / "report.md").read_text()
    (folder / "summary.json").write_bytes(b"\0")
    assert simulated_before(folder, results) is None
    capsys.readouterr()


def test_a_report_is_of_the_machine_the_time_and_the_code_of_its_points(folder: Path) -> None:
    series, results = read_series(folder)
    machine = msgspec.structs.replace(Machine.here(), model="the one that it was measured on")
    found = write_report(
        folder,
        msgspec.structs.replace(series, machine=machine),
        [msgspec.structs.replace(result, commit="abc", date="2026-01-01T00:00:00+0000") for result in results],
    )
    assert (found.machine, found.commit, found.date) == (machine, "abc", "2026-01-01T00:00:00+0000")
    assert "Measured on: " in (folder / "report.md").read_text()


@pytest.mark.parametrize("content", [b"", bytes(range(256)), b"\0\n", b"/no/such/run\n"])
def test_a_note_that_names_no_run_is_told_and_the_point_started_anew(content: bytes, folder: Path) -> None:
    point_file(folder, "nodes-1").unlink()
    series, said = read_series(folder)[0], list[str]()
    run_note(folder, series.points[0]).write_bytes(content)
    run = SeriesRun(folder, series, said.append)
    run._take_up()
    assert [point.name for point in run._left] == ["nodes-1"]
    assert "nodes-1: started anew, for the run that it had cannot be waited for" in said[-1]


def test_a_simulation_that_cannot_be_made_is_in_the_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(folder), "--simulate", "nodes=4"]) == 1
    text = (folder / "report.md").read_text()
    assert "## Simulated continuation\n\nIt could not be made: --simulate: the run of point nodes-1" in text
    point_file(folder, "nodes-1").unlink()
    shutil.rmtree(folder / "plots")
    assert main(["bench", "report", str(folder), "--simulate", "nodes=4"]) == 1
    assert "no point of the series was measured" in (folder / "report.md").read_text()
    capsys.readouterr()
