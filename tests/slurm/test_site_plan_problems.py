"""Plans that a site cannot give, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from site_texts import NEW, OLD, site_that_says

from prorl_hpc.config.schema import ClusterConfig, ProrlConfig
from prorl_hpc.slurm.plan_problems import plan_problems
from prorl_hpc.slurm.site import Site, ask_site

GOOD = [
    "cluster.rollout.partition=batch",
    "cluster.inference.partition=accel",
    "cluster.inference.gpus=2",
    "cluster.inference.gpu_type=a100",
    "cluster.trainer.partition=accel",
    "cluster.trainer.gpus=8",
    "cluster.trainer.constraint=h100&nvlink",
    "cluster.account=lab",
]


def planned(overrides: Iterable[str]) -> ProrlConfig:
    """``name=value`` set in a Slurm configuration; Hydra would take a third of a second each."""
    config = ProrlConfig(cluster=ClusterConfig(kind="slurm"))
    for override in overrides:
        name, _, value = override.partition("=")
        *path, last = name.split(".")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        if isinstance(owner, dict):
            owner[last] = value
        else:
            setattr(owner, last, type(getattr(owner, last))(value))
    return config


def problems(texts: dict[str, str], *overrides: str, user: str = "ann") -> list[str]:
    return plan_problems(planned(overrides), ask_site(site_that_says(texts), user))


def test_a_plan_that_fits_has_no_problems() -> None:
    assert problems(OLD, "cluster.inference.partition=gpu", "cluster.trainer.partition=gpu") == []
    assert problems(NEW, *GOOD) == []
    assert problems(NEW, *GOOD, "cluster.reservation=", "cluster.rollout.partition=batch,accel") == []


def test_a_local_plan_asks_for_nothing() -> None:
    assert plan_problems(ProrlConfig(), Site(silent="down")) == []


def test_a_silent_controller_is_one_problem() -> None:
    (problem,) = plan_problems(planned([]), Site(silent="`scontrol show config`: no answer"))
    assert "no answer" in problem and "SLURM_CONF" in problem


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["cluster.rollout.partition=bach"],
            "cluster.rollout.partition=bach: there is no partition bach; did you mean batch?",
        ),
        (
            ["cluster.time_minutes=4000"],
            "cluster.time_minutes=4000 is 4000 minutes, partition batch allows at most 2880",
        ),
        (
            ["cluster.rollout.nodes=5"],
            "cluster.rollout.nodes=5: partition batch gives at most 4 nodes to a job (MaxNodes=4)",
        ),
        (
            ["cluster.inference.nodes=4"],
            "cluster.inference.nodes=4: partition accel gives at most 3 nodes to a job (3 in all)",
        ),
        (["cluster.rollout.cpus=200"], "cluster.rollout.cpus=200: no node of partition batch gives more than 128 CPUs"),
        (["cluster.trainer.cpus=100"], "cluster.trainer.cpus=100: no node of partition accel gives more than 64 CPUs"),
        (
            ["cluster.rollout.memory_gib=300"],
            "cluster.rollout.memory_gib=300: no node of partition batch gives more than 244.1",
        ),
        (
            ["cluster.inference.gpus=5"],
            "cluster.inference.gpus=5: no node of partition accel has more than 4 GPUs of type a100",
        ),
        (
            ["cluster.inference.gpu_type=a10"],
            "cluster.inference.gpu_type=a10: no node of partition accel has GPUs of type a10; did you mean a100",
        ),
        (["cluster.rollout.gpus=1"], "cluster.rollout.gpus=1: the nodes of partition batch have no GPUs"),
        (
            ["cluster.trainer.constraint=h10"],
            "constraint=h10: no node of partition accel has the feature h10; did you mean h100",
        ),
        (
            ["cluster.trainer.nodelist=h02"],
            "cluster.trainer.nodelist=h02: partition accel has no node h02; did you mean h01",
        ),
        (
            ["cluster.account=lap"],
            "cluster.account=lap is not one of ann's; did you mean lab? accounts: lab, old, proj1",
        ),
        (
            ["cluster.trainer.account=old"],
            "cluster.trainer.account=old may not be used in partition accel; accounts: lab, proj1",
        ),
        (["cluster.qos=debug"], "cluster.qos=debug is not one of ann's with account lab; QOS: long, normal"),
        (["cluster.qos=fast"], "cluster.qos=fast: there is no such QOS; yours: long, normal"),
        (
            ["cluster.qos=normal", "cluster.time_minutes=2000"],
            "is 2000 minutes, cluster.qos=normal allows at most 1440 (MaxWall)",
        ),
        (
            ["cluster.reservation=curse"],
            "cluster.reservation=curse: there is no reservation curse; did you mean course?",
        ),
        (["cluster.reservation=course"], "lies in partition accel, this component asks for batch"),
        (["cluster.inference.partition=event"], "cluster.inference.partition=event is DOWN at this site"),
        (["cluster.inference.partition=event"], "takes only jobs of a reservation (ReqResv=YES)"),
        (["cluster.trainer.extra.partition=acel"], "cluster.trainer.extra.partition=acel: there is no partition acel"),
        (["cluster.extra.time=3-00:00:00"], "cluster.extra.time=3-00:00:00 is 4320 minutes, partition batch allows"),
        (
            ["cluster.extra.gres=gpu:h100:9"],
            "cluster.extra.gres=gpu:h100:9: the nodes of partition batch have no GPUs",
        ),
    ],
)
def test_what_cannot_be_is_named_with_its_setting(overrides: list[str], told: str) -> None:
    assert any(told in problem for problem in problems(NEW, *GOOD, *overrides)), problems(NEW, *GOOD, *overrides)


def test_the_long_qos_goes_over_a_partitions_time_limit() -> None:
    assert problems(NEW, *GOOD, "cluster.qos=long", "cluster.time_minutes=4000") == []


def test_a_reservation_is_for_its_users() -> None:
    assert any(
        "is for ann, bob, not for eve" in p for p in problems(NEW, *GOOD, "cluster.reservation=course", user="eve")
    )


def test_a_user_without_an_account_is_told_so() -> None:
    found = problems({**NEW, "sacctmgr -nP show assoc": ""}, *GOOD)
    assert "cluster.account: user ann has no account at this site: ask the admins for one" in found


def test_accounts_that_are_not_enforced_are_not_judged() -> None:
    config = NEW["scontrol show config"].replace("associations,limits,qos,safe", "none")
    assert problems({**NEW, "scontrol show config": config}, *GOOD, "cluster.rollout.account=any") == []


def test_without_a_default_partition_one_must_be_named() -> None:
    texts = {**OLD, "scontrol show partition": OLD["scontrol show partition"].replace("Default=YES", "Default=NO")}
    assert "cluster.rollout.partition is empty and this site has no default; partitions: cpu, gpu" in problems(texts)


def test_all_that_a_component_asks_for_must_be_on_the_same_nodes() -> None:
    found = problems(
        NEW, *GOOD, "cluster.inference.nodes=2", "cluster.inference.memory_gib=600", "cluster.inference.gpu_type="
    )
    assert any("cluster.inference.nodes=2: 1 of the 3 nodes of partition accel have all at once" in p for p in found)


def test_components_that_share_a_partition_need_nodes_of_their_own() -> None:
    gpu = ["cluster.inference.partition=gpu", "cluster.trainer.partition=gpu"]
    (problem,) = problems(OLD, *gpu, "cluster.inference.nodes=2")
    assert problem.startswith("cluster.inference and cluster.trainer need 3 different nodes at the same time, 2 have")
    (problem,) = problems(OLD, *gpu, "cluster.inference.nodelist=gpu02", "cluster.trainer.nodelist=gpu02")
    assert "both name gpu02" in problem and "same_nodes_as" in problem
    assert problems(OLD, *gpu, "cluster.trainer.same_nodes_as=inference", "cluster.trainer.partition=") == []


def test_a_site_that_starts_no_heterogeneous_jobs_takes_one_component() -> None:
    texts = {**OLD, "scontrol show config": OLD["scontrol show config"].replace("sched/backfill", "sched/builtin")}
    assert any("only sched/backfill starts heterogeneous jobs" in p for p in problems(texts))
    merged = ["cluster.inference.same_nodes_as=rollout", "cluster.trainer.same_nodes_as=rollout"]
    assert problems(texts, *merged) == []
