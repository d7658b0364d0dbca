"""`prorl-hpc bench scaling`: what its words become, and wrong ones that are told before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.__main__ import main
from prorl_hpc.bench.scaling import ENGINE, points_of, read_words
from prorl_hpc.bench.scaling_records import SERIES_FILE, LoadOrder, PointSpec, Series
from prorl_hpc.bench.series_folder import only_here
from prorl_hpc.bench.series_launch import LOAD_PROCESS, compose_points, last, last_of_each, point_words, with_load
from prorl_hpc.bench.series_private import nodes_needed
from prorl_hpc.config.schema import ClusterConfig, ComponentConfig, ProrlConfig, TrainerConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.plan import make_plan


def test_more_nodes_get_more_rollouts_in_proportion() -> None:
    points = points_of(read_words(["nodes=4,1", "workload=math-like", "rollout.run_slots=3", "minutes=7"]), "slurm")
    assert [(point.name, point.nodes, point.load.rollouts) for point in points] == [
        ("nodes-1", 1, 128),  # all 64 rows of the workload equally often, for at least 12 for each slot and 128 in all
        ("nodes-4", 4, 256),
    ]
    assert {last(points[0].overrides, name) for name in ("bench", "engine", "rollout.run_slots")} == {
        "math-like",
        "scripted",
        "3",
    }
    assert points[0].time_minutes == 7
    (named,) = points_of(read_words(["nodes=2", "rollouts=5"]), "local")
    assert named.load.rollouts == 10
    assert last(named.overrides, "bench") == "mixed"


def test_a_scripted_engine_takes_time_unless_its_times_are_given() -> None:
    (point,) = points_of(read_words(["nodes=1"]), "local")
    assert set(ENGINE) < set(point.overrides)
    for words in (["engine=vllm"], ["engine.script.token_s=0.5"]):
        (point,) = points_of(read_words(["nodes=1", *words]), "local")
        assert not set(ENGINE) & set(point.overrides)


def test_without_nodes_ablations_are_measured_alone() -> None:
    assert read_words(["ablate=pools,shell"]).nodes == []
    assert read_words(["ablate=pools", "nodes=2"]).nodes == [2]
    assert read_words([]).nodes == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("place", "sizes"),
    [
        ("local", {"rollout.workers_per_node": "6", "engine.servers_per_node": "3", "cluster.rollout.nodes": ""}),
        ("slurm", {"cluster.rollout.nodes": "3", "cluster.inference.nodes": "3", "rollout.workers_per_node": "2"}),
        ("private", {"cluster.rollout.nodes": "3", "cluster": "slurm", "cluster.inference.partition": "cpu"}),
    ],
)
def test_what_a_node_is_depends_on_the_place(place: str, sizes: dict[str, str], tmp_path: Path) -> None:
    spec = PointSpec("p", 3, ["engine=scripted", "rollout.workers_per_node=2"], LoadOrder(rollouts=3), time_minutes=9)
    words = point_words(spec, place, tmp_path)
    assert {name: last(words, name) for name in sizes} == sizes
    assert last(words, "cluster.time_minutes") == "9"
    assert last(words, "cluster.requeue") == "false"
    assert last(words, "run.root") == str(tmp_path / "runs")


def test_who_names_a_model_or_a_cluster_gets_that_one(tmp_path: Path) -> None:
    spec = PointSpec("p", 1, ["engine=vllm", "model=tiny", "cluster=site_gpu"], LoadOrder(rollouts=1))
    words = point_words(spec, "slurm", tmp_path)
    assert (last(words, "model"), last(words, "model.path"), last(words, "cluster")) == ("tiny", "", "site_gpu")


def test_a_setting_that_is_given_twice_has_its_last_value() -> None:
    assert last_of_each(["a=1", "b=2", "+a=3"]) == ["b=2", "+a=3"]


def test_the_load_process_runs_once_beside_the_coordinator() -> None:
    nodes = ComponentConfig(nodes=2)
    cluster = ClusterConfig(kind="slurm", rollout=nodes, inference=nodes)
    plan = with_load(make_plan(ProrlConfig(cluster=cluster, trainer=TrainerConfig(enabled=False))))
    places = [[process.name for process in node.processes] for node in plan.nodes]
    assert places == [["coordinator", "worker-0", LOAD_PROCESS], ["worker-1"], ["inference-0"], ["inference-1"]]


def test_a_private_cluster_has_a_node_for_each_worker_and_each_server() -> None:
    def series(nodes: int) -> Series:
        return Series([], "private", [PointSpec("p", nodes, [], LoadOrder(rollouts=1))])

    assert nodes_needed(series(8)) == 16
    with pytest.raises(ConfigError, match=r"nodes=64.*at most 40"):
        nodes_needed(series(64))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["node=1,2"], "node=1,2 is not known here: did you mean nodes?"),
        (["workload=swe"], "did you mean swe-like?"),
        (["bench=mixed"], "bench=mixed: the workload is chosen by workload=mixed"),
        (["nodes=0"], "nodes=0: expected a whole number, 1 or more"),
        (["nodes=1,,2"], "nodes=1,,2: expected whole numbers with a comma between them"),
        (["nodes=1,x"], "nodes=x: expected a whole number"),
        (["nodes=2,2"], "a number stands there twice"),
        (["nodes=9999"], "at most 4096 nodes"),
        (["minutes=0"], "minutes=0: expected"),
        (["rollouts=999999999999"], "rollouts=999999999999: must be at most 1,000,000"),
        (["rollouts=" + 5000 * "9"], "must be at most 1,000,000"),
        (["rollouts=1000000", "nodes=1,20", "--local"], "20,000,000 rollouts of one point"),
        (["rollouts="], "rollouts= is empty"),
        (["ablate=,"], "a name between the commas is empty"),
        (["ablate=shell,shell"], "a name stands there twice"),
        (["ablate=all,shell"], "name them alone"),
        (["nodes=1", "nodes=2"], "nodes=1 and nodes=2: it is given twice"),
        (["run.name=a"], "run.name=a: the points are named by the series"),
        (["+run.root=a"], "out=DIR"),
        (["cluster.time_minutes=5"], "the time limit of a point is minutes="),
        (["cluster.rollout.nodes=5"], "nodes="),
        (["rollout.runslots=3", "--local"], "did you mean rollout.run_slots?"),
        (["ablate=pool", "--local"], "Did you mean pools?"),
        (["ablate=cleanup", "workload=math-like"], "workload=math-like is for the points of nodes="),
        (["ablate=cleanup", "rollouts=3"], "rollouts=3 is for the points of nodes="),
        (["workload=mywork"], "/bench/NAME.yaml"),
        (["workload=recorded"], "needs recorded=DIR"),
        (["recorded=/no/such/run"], "recorded=/no/such/run: there is no run there"),
        (["recorded=/", "workload=mixed"], "needs workload=recorded"),
        (["at_once=2", "--local"], "one at a time"),
        (["cluster=slurm", "--local"], "name two places"),
        (["--simulate", ""], "expected nodes="),
        (["--simulate", "16,64"], "--simulate 16,64: expected nodes="),
    ],
)
def test_wrong_words_of_bench_scaling(
    words: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "series"
    assert main(["bench", "scaling", *words, f"out={folder}"]) == 2
    assert answer in capsys.readouterr().err
    assert not folder.exists()


def test_another_series_and_foreign_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").touch()
    point = PointSpec("nodes-3", 3, [], LoadOrder(rollouts=3))
    assert main(["bench", "scaling", "nodes=1", "--local", f"out={tmp_path}"]) == 2
    assert "holds no series" in capsys.readouterr().err
    write_json(tmp_path / SERIES_FILE, Series(["prorl-hpc", "bench", "scaling", "nodes=3"], "local", [point]))
    assert main(["bench", "scaling", "nodes=1", "--local", f"out={tmp_path}"]) == 2
    assert "holds another series: `prorl-hpc bench scaling nodes=3`" in capsys.readouterr().err


def test_what_is_wrong_with_any_point_is_told_before_the_first_is_started(tmp_path: Path) -> None:
    points = [
        PointSpec("good", 1, ["engine=scripted"], LoadOrder(rollouts=1)),
        PointSpec("bad", 1, ["engine=scripted", "rollout.run_slots=0"], LoadOrder(rollouts=1)),
    ]
    told = r"nothing was\s+started:\n  - rollout.run_slots=0: must be.*\(in bad\)"
    with pytest.raises(ConfigError, match=told), only_here(tmp_path / "series"):
        compose_points(points, "local", tmp_path / "series")
    assert not (tmp_path / "series").exists()


def test_without_slurm_it_says_what_else_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert main(["bench", "scaling", "nodes=1", f"out={tmp_path / 'series'}"]) == 2
    told = capsys.readouterr().err
    assert "--local" in told and "--private" in told
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    "words",
    [
        ["fit", ""],
        ["report", ""],
        ["all", "--write", ""],
        ["tools", "--write", ""],
        ["scaling", "--local", "--write", ""],
    ],
)
def test_an_empty_path_is_not_this_directory(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2
    assert "it is empty: name a path" in capsys.readouterr().err


def test_the_page_is_looked_at_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n")
    assert main(["bench", "scaling", "--local", "nodes=1", f"out={tmp_path / 'series'}", "--write", str(page)]) == 2
    assert "<!-- bench scaling -->" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks.md"]


def test_an_empty_folder_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "--local", "nodes=1", "out="]) == 2
    assert "out= is empty" in capsys.readouterr().err


def test_quick_points_of_one_machine_have_few_rollouts() -> None:
    asked = read_words(["nodes=1,2"])
    assert [point.load.rollouts for point in points_of(asked, "private", quick=True)] == [48, 96]
    assert [point.load.rollouts for point in points_of(asked, "local")] == [128, 128]
    assert points_of(asked, "slurm", quick=True) == points_of(asked, "slurm")
