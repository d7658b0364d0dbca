"""``prorl-hpc simulate`` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl_hpc.__main__ import main

SMALL = ["rollouts=200", "nodes=2", "slots=4"]


def test_tables_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *SMALL]) == 0
    out = capsys.readouterr().out
    for part in ("200 done", "rollouts/s", "limited by", "utilisation", "p99", "plot: simulation.png"):
        assert part in out
    assert (tmp_path / "simulation.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object_and_no_plot_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *SMALL, "plot=", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["statuses"]["done"] == 200
    assert 0 < figures["throughput_per_s"] <= figures["ideal_per_s"] * 1.5
    assert figures["pools"]["run"]["size"] == 8
    assert figures["config"]["slots"] == 4
    assert list(tmp_path.iterdir()) == []


def test_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "c.png"
    settings = ["groups_per_batch=5", "uniform_share=0.4", "server_concurrency=2", f"plot={plot}"]
    assert main(["simulate", "--compare", *SMALL, *settings]) == 0
    out = capsys.readouterr().out
    for policy in ("least in flight", "one coupled pool", "round robin", "synchronous batches"):
        assert policy in out
    assert plot.exists()
    assert main(["simulate", "--compare", "--json", *SMALL, "plot="]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert set(compared["results"]) | set(compared["left_out"]) == {
        "decoupled, least in flight, refill at once",
        "one coupled pool",
        "round robin",
        "synchronous batches",
    }


def test_settings_from_a_file_and_the_line_goes_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("nodes: 3\nslots: 5\nrollouts: 50\nworkloads:\n  a: {run: constant:1}\n  b: {weight: 2}\n")
    assert main(["simulate", "--config", str(file), "slots=6", "--json", "plot="]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["nodes"], config["slots"]) == (3, 6)
    assert config["workloads"]["b"]["weight"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rolouts=3"], "no setting rolouts. Did you mean rollouts"),
        (["rollouts"], "write name=value"),
        (["nodes=many"], "nodes"),
        (["nodes="], "nodes"),
        (["nodes=0"], "nodes=0: must be at least 1"),
        (["run=soon"], "run=soon"),
        (["arrivals=uniform:1"], "arrivals=uniform:1"),
        (["init_failures=1"], "init_failures=1.0"),
        (["balancing=random"], "least_in_flight or round_robin"),
        (["workloads.a.run=gauss:1"], "workloads.a.run"),
        (["workloads.a.wait=1"], "workloads.a.wait"),
        (["workloads.a.weight=0"], "workloads.a.weight"),
        (["recorded=/nowhere"], "/nowhere"),
        (["recorded=/x", "workloads.a.run=1"], "give one of them"),
        (["groups_per_batch=2", "arrivals=1"], "give one of them"),
        (["plot=/nowhere/x.png"], "plot=/nowhere/x.png"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_odd_settings_are_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "plot=", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "nodes: [\n", "noodes: 3\n", "7\n"])
def test_odd_files_are_one_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    assert main(["simulate", "--config", str(file)]) == 2
    assert "prorl-hpc simulate:" in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    from prorl_hpc.bench.simulation_config import settings

    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    for name, _, _ in settings():
        assert f"  {name}" in out
