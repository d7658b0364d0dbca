"""Components that do not fit together, clocks that cut a run off, and words that Slurm would misread."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.config.cluster_validation import wasted
from prorl_hpc.config.schema import ClusterConfig, ComponentConfig, ContainerConfig, ProrlConfig
from prorl_hpc.config.store import compose, conf_dir
from prorl_hpc.config.validation import setting, validate

SITES = sorted(path.stem for path in (conf_dir() / "cluster").glob("*.yaml"))


def slurm(**values: Any) -> ProrlConfig:
    config = ProrlConfig()
    config.model.prepare = "tiny"
    config.cluster.kind = "slurm"
    for dotted, value in values.items():
        group, _, name = dotted.rpartition("__")
        setattr(setting(config, group.replace("__", ".")), name, value)
    return config


@pytest.mark.parametrize("site", SITES)
def test_every_example_of_a_site_is_valid_and_wastes_nothing(site: str) -> None:
    config = compose([f"cluster={site}"])
    assert validate(config) == []
    assert list(wasted(config)) == []


def test_every_setting_of_a_site_is_in_an_example_with_a_comment() -> None:
    lines = [line for site in SITES for line in (conf_dir() / "cluster" / f"{site}.yaml").read_text().splitlines()]
    commented = {line.split(":")[0].strip() for line in lines if "#" in line and ":" in line.split("#")[0]}
    for cls in (ClusterConfig, ComponentConfig, ContainerConfig):
        names = {field.name for field in dataclasses.fields(cls)} - {"kind", "rollout", "inference", "trainer"}
        assert names - commented == set(), cls


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cluster__rollout__nodes": 0}, "cluster.rollout.nodes=0: the coordinator and the agents run there"),
        (
            {"cluster__trainer__nodes": 0},
            "cluster.trainer.nodes=0 with trainer.enabled=true: set trainer.enabled=false",
        ),
        ({"cluster__inference__nodes": 0}, "nobody would serve the policy"),
        ({"engine__outside": ["http://h:1/v1"]}, "cannot take the trainer's weights"),
        ({"trainer__enabled": False, "engine__outside": ["h:1"]}, "engine.outside: 'h:1' must be the URL"),
        ({"trainer__enabled": False, "engine__outside": ["unix:/s", "unix:/s"]}, "named once"),
        ({"cluster__trainer__same_nodes_as": "worker"}, "must be rollout or inference, or left out"),
        ({"cluster__trainer__same_nodes_as": "trainer"}, "must be rollout or inference, or left out"),
        (
            {"cluster__trainer__same_nodes_as": "inference", "cluster__trainer__gpus": 2},
            "cluster.trainer.gpus=2: trainer runs on the nodes of inference",
        ),
        (
            {"cluster__trainer__same_nodes_as": "inference", "cluster__trainer__nodes": 2},
            "cluster.trainer.nodes=2: trainer runs on the nodes of inference",
        ),
        (
            {"trainer__enabled": False, "cluster__rollout__same_nodes_as": "trainer", "cluster__trainer__nodes": 0},
            "cluster.trainer.nodes=0: rollout is to run on those nodes",
        ),
        (
            {"cluster__trainer__same_nodes_as": "inference", "cluster__inference__gpus": 1},
            "cluster.inference.gpus=1: its processes need 2 per node",
        ),
        (
            {"cluster__inference__gpus": 4, "engine__tensor_parallel": 3},
            "engine.tensor_parallel=3 does not divide cluster.inference.gpus=4: use 1, 2, 4",
        ),
        ({"cluster__signal_lead_s": 20.0}, "set it to 55 or more"),
        ({"cluster__time_minutes": 2}, "leaves nothing of cluster.time_minutes=2 (120 s)"),
        ({"cluster__signal_lead_s": 1e6, "cluster__time_minutes": 10**6}, "at most 65535"),
        ({"run__drain_s": -1.0}, "run.drain_s=-1.0: must be 0 or more"),
        ({"cluster__requeue_without_progress": 0}, "cluster.requeue_without_progress=0: must be at least 1"),
        ({"cluster__gpu_option": "gpu"}, "one of gpus-per-node, gres"),
        ({"cluster__mail_user": "me@example.org"}, "gets no mail without cluster.mail_type"),
        ({"cluster__mail_type": ["END", "DONE"]}, "DONE is none of ALL, BEGIN"),
        ({"cluster__account": "my account"}, "cluster.account='my account': must be one word"),
        ({"cluster__trainer__partition": "-x"}, "cluster.trainer.partition='-x': must be one word"),
        ({"cluster__inference__gpu_type": "a100"}, "without cluster.inference.gpus"),
        ({"cluster__inference__gpu_type": "a100:4", "cluster__inference__gpus": 1}, "must be the type alone"),
        ({"cluster__rollout__cpu_bind": "core"}, "cluster.rollout.cpu_bind=core: must be one of none"),
        ({"cluster__interface": "10.0.0.1"}, "an address alone is one node's"),
        ({"cluster__interface": "10.0.0.1/16"}, "has host bits set"),
        ({"cluster__interface": "ib 0"}, "is no name of an interface"),
        ({"cluster__modules": ["cuda; rm x"]}, "must be the name of one module"),
        ({"cluster__setup": ["a\nb"]}, "make each line an entry of its own"),
        (
            {"cluster__trainer__setup": ["export A=1 \\"]},
            "cluster.trainer.setup: 'export A=1 \\\\' ends with a backslash",
        ),
        ({"cluster__sbatch_lines": ["SBATCH --x"]}, "begins with #"),
        ({"cluster__sbatch_lines": ["#SBATCH hetjob"]}, "decided by the plan"),
        ({"cluster__extra": {"mem": "64 GB"}}, "cluster.extra.mem=64 GB: must be a whole number"),
        (
            {"cluster__trainer__extra": {"mem": "64G"}, "cluster__trainer__memory_gib": 2.0},
            "cluster.trainer.extra.mem=64G and cluster.trainer.memory_gib=2.0 are the same",
        ),
        ({"cluster__account": "$(id)"}, "cluster.account='$(id)' has '$' '(' ')' in it: must be letters, digits and"),
        ({"cluster__qos": "a;b"}, "cluster.qos='a;b' has ';' in it"),
        ({"cluster__licenses": "a`b"}, "cluster.licenses='a`b' has '`' in it: must be licenses"),
        ({"cluster__mail_user": "a|b", "cluster__mail_type": ["END"]}, "cluster.mail_user='a|b' has '|' in it"),
        ({"cluster__trainer__partition": "a\x07"}, "has '\\x07' in it"),
        ({"cluster__trainer__nodelist": "n[1-2]*2"}, "must be names of nodes, as in node[01-04,07]"),
        ({"cluster__trainer__constraint": "a>b"}, "must be features, put together by"),
        ({"cluster__rollout__cpu_bind": "map_cpu:0 --x"}, "cpu_bind='map_cpu:0 --x': must be one word"),
        ({"cluster__extra": {"comment": "a\nb"}}, "cluster.extra.comment='a\\nb' has '\\n' in it: must be one line"),
        ({"cluster__trainer__extra": {"comment": "\u2028"}}, "cluster.trainer.extra.comment"),
        (
            {"cluster__extra": {"comment": "x" * 5000}},
            "cluster.extra.comment is 5000 characters long: must be at most 4000",
        ),
        ({"cluster__setup": ["a\rb"]}, "cluster.setup='a\\rb' has '\\r' in it"),
        ({"cluster__setup": ["a\x00b"]}, "cluster.setup='a\\x00b' has '\\x00' in it"),
        ({"cluster__container__python": "p\n"}, "cluster.container.python='p\\n' has"),
        ({"engine__extra_args": ["a\0"]}, "engine.extra_args='a\\x00' has"),
        ({"engine__env": {"A=B": "c"}}, "engine.env: 'A=B' must be the name of an environment variable"),
        ({"run__runtime_root": "relative/x"}, "run.runtime_root=relative/x: must be absolute"),
        ({"run__runtime_root": "/x\n"}, "run.runtime_root='/x\\n' has"),
        ({"cluster__rollout__nodes": 50_000_000}, "cluster.rollout.nodes=50000000: must be at most 10,000"),
        ({"rollout__workers_per_node": 50_000_000}, "rollout.workers_per_node=50000000: must be at most 1,024"),
        ({"engine__servers_per_node": 1025}, "engine.servers_per_node=1025: must be at most 1,024"),
        ({"trainer__ranks_per_node": 1025}, "trainer.ranks_per_node=1025: must be at most 1,024"),
        ({"task__train__size": 10**9}, "task.train.size=1000000000: must be at most 1,000,000"),
        (
            {"cluster__trainer__memory_gib": 1e12},
            "cluster.trainer.memory_gib=1000000000000.0: must be at most 1,000,000",
        ),
        (
            {"cluster__rollout__nodes": 10_000, "rollout__workers_per_node": 1_000},
            "10000 nodes of rollout with rollout.workers_per_node=1000 are 10,000,000 processes: must be at most 100,000",
        ),
        ({"cluster__container__args": ["--nv"]}, "has no effect without cluster.container.image"),
    ],
)
def test_one_mistake_of_a_site_is_one_sentence(values: dict[str, Any], words: str) -> None:
    errors = validate(slurm(**values))
    assert len(errors) == 1, errors
    assert words in errors[0]


@pytest.mark.parametrize(("minutes", "lead"), [(1, 120.0), (2, 120.0), (1, 20.0), (1, 38.0), (3, 200.0)])
@pytest.mark.parametrize("drain", [30.0, 300.0])
def test_times_too_short_to_leave_off_are_answered_with_ones_that_fit(minutes: int, lead: float, drain: float) -> None:
    given = {"cluster__time_minutes": minutes, "cluster__signal_lead_s": lead, "run__drain_s": drain}
    errors = validate(slurm(**given))
    if not errors:
        assert drain + 8 <= lead < 60 * minutes
        return
    (error,) = errors
    for text in (f"cluster.signal_lead_s={lead:g}", f"run.drain_s={drain:g}", "run.stop_timeout_s=25"):
        assert text in error
    cure = error.rpartition(": ")[2] if "leaves nothing" in error else error.rpartition("; ")[2]
    new_lead = re.search(r"(?:signal_lead_s=|set it to )(\d+)", cure)
    new_minutes = re.search(r"time_minutes=(\d+)", cure)
    both = " and " in cure
    if new_lead:
        changed = {**given, "cluster__signal_lead_s": float(new_lead[1])}
        changed |= {"cluster__time_minutes": int(new_minutes[1])} if both and new_minutes else {}
        assert validate(slurm(**changed)) == []
    if new_minutes and not both:
        told = validate(slurm(**{**given, "cluster__time_minutes": int(new_minutes[1])}))
        assert told == [] or lead < drain + 8
    assert new_lead or new_minutes


def test_components_that_name_one_another_are_told_each() -> None:
    errors = validate(slurm(cluster__trainer__same_nodes_as="inference", cluster__inference__same_nodes_as="trainer"))
    assert len(errors) == 2 and all("in a circle" in error for error in errors)


@pytest.mark.parametrize(
    "values",
    [
        {"cluster__interface": "ib0"},
        {"cluster__trainer__constraint": "[(knl&hbm)*2|(ib,a100)]"},
        {"cluster__trainer__nodelist": "gpu[01-04,07],big1"},
        {"cluster__trainer__nodelist": "./nodes.txt"},
        {"cluster__trainer__partition": "a,b", "cluster__account": "wsl-2.x@y", "cluster__licenses": "m:2,a@s:1|b"},
        {
            "cluster__extra": {"comment": "it's 'two' words \\ $(id)"},
            "cluster__setup": ["\tx=$(id -u); echo 'é' \"$x\""],
        },
        {"run__runtime_root": "$SLURM_TMPDIR/x"},
        {"cluster__rollout__nodes": 10_000},
        {"cluster__interface": "10.1.0.0/16"},
        {"cluster__interface": "fd00::/8"},
        {"cluster__rollout__cpu_bind": "verbose,map_cpu:0,1,2"},
        {"cluster__rollout__cpu_bind": "quiet,cores"},
        {"cluster__rollout__same_nodes_as": "trainer", "cluster__inference__same_nodes_as": "rollout"},
        {"trainer__enabled": False, "cluster__inference__nodes": 0},  # LLM servers come by HTTP
        {"trainer__enabled": False, "cluster__inference__nodes": 0, "engine__outside": ["https://h/v1", "unix:/s"]},
        {"cluster__trainer__same_nodes_as": "inference", "cluster__inference__gpus": 4, "engine__tensor_parallel": 3},
    ],
)
def test_what_is_allowed(values: dict[str, Any]) -> None:
    assert validate(slurm(**values)) == []


def test_idle_gpus_are_warned_of() -> None:
    config = slurm(cluster__inference__gpus=4, engine__tensor_parallel=2, cluster__rollout__gpus=1)
    told = list(wasted(config))
    assert "cluster.rollout.gpus=1: 1 of each node's GPUs stay idle" in told[0]
    assert "cluster.inference.gpus=4: 2 of each node's GPUs stay idle; its processes use 2" in told[1]


@pytest.mark.parametrize(
    "name", ["licenses", "mail_user", "trainer__nodelist", "rollout__gpu_type", "trainer__cpu_bind"]
)
def test_one_machine_refuses_what_only_slurm_understands(name: str) -> None:
    config = slurm(**{f"cluster__{name}": "x"})
    config.cluster.kind = "local"
    (error,) = validate(config)
    assert "has no effect on one machine" in error


def test_user_directories_are_searched_and_named_ones_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    for directory, account in ((site, "of-site"), (home / "prorl_hpc" / "conf", "of-user")):
        (directory / "cluster").mkdir(parents=True)
        (directory / "cluster" / f"{account}.yaml").write_text(f"kind: slurm\naccount: {account}\n")
    monkeypatch.setenv("PRORL_CONF_DIR", str(site))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    for account in ("of-site", "of-user"):
        assert compose([f"cluster={account}"]).cluster.account == account
