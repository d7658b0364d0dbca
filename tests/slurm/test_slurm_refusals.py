"""sbatch's words, told as settings."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm.refusals import ask_sbatch, explain_refusal, sbatch_words

FAILED = "sbatch: error: Batch job submission failed: "


def config_of(**values: Any) -> ProrlConfig:
    config = ProrlConfig()
    config.cluster.kind = "slurm"
    for name, value in values.items():
        part, _, last = name.rpartition("__")
        setattr(getattr(config.cluster, part) if part else config.cluster, last, value)
    return config


@pytest.mark.parametrize(
    ("said", "values", "told"),
    [
        ("Invalid account or account/partition combination specified", {"account": "abc"}, "cluster.account=abc: give"),
        ("Invalid account or account/partition combination specified", {}, "none of cluster.account"),
        ("Invalid partition name specified", {"trainer__partition": "moon"}, "cluster.trainer.partition=moon: give"),
        ("Requested node configuration is not available", {"inference__gpus": 9}, "cluster.inference.gpus=9"),
        (
            "Requested time limit is invalid (missing or exceeds some limit)",
            {"time_minutes": 9},
            "cluster.time_minutes=9",
        ),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            {"qos": "short"},
            "cluster.qos=short",
        ),
        ("QOSMaxSubmitJobPerUserLimit", {"qos": "short"}, "cluster.qos=short"),
        ("Invalid qos specification", {"qos": "x"}, "cluster.qos=x: give a QOS"),
        ("Requested reservation is invalid", {"reservation": "r"}, "cluster.reservation=r"),
        ("Invalid license specification", {"licenses": "l:1"}, "cluster.licenses=l:1"),
        ("Invalid generic resource (gres) specification", {"trainer__gpu_type": "x"}, "cluster.trainer.gpu_type=x"),
        ("Invalid feature specification", {"rollout__constraint": "f"}, "cluster.rollout.constraint=f"),
        ("Memory required by task is not available", {"rollout__memory_gib": 9.0}, "cluster.rollout.memory_gib=9.0"),
        ("Unable to contact slurm controller (connect failure)", {"account": "abc"}, "scontrol ping"),
    ],
)
def test_a_refusal_names_the_settings_that_cause_it(said: str, values: dict[str, Any], told: str) -> None:
    text = explain_refusal(f"Command failed\n{FAILED}{said}\nTraceback", config_of(**values))
    assert text.startswith(f"Slurm refused the job: Batch job submission failed: {said}")
    assert told in text


def test_components_that_take_no_part_are_not_named() -> None:
    config = config_of(trainer__partition="a", inference__partition="b", inference__nodes=0)
    config.trainer.enabled = False
    assert "cluster.trainer" not in explain_refusal(FAILED + "Invalid partition name specified", config)
    assert "cluster.inference" not in explain_refusal(FAILED + "Invalid partition name specified", config)


def test_what_is_not_known_is_told_as_it_is() -> None:
    assert explain_refusal("something else", config_of()) == "Slurm refused the job: something else"
    assert sbatch_words("sbatch: error: a\nsbatch: error: a\nsbatch: fatal: b\n") == "a; b"


@pytest.mark.slurm
def test_a_real_slurm_refuses_and_is_understood(slurm_mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_mini.conf))
    config = config_of(rollout__partition="moon", rollout__nodes=999, time_minutes=10**6)
    scripts = {"--partition=moon": "cluster.rollout.partition=moon", "--nodes=999": "cluster.rollout.nodes=999"}
    for option, told in scripts.items():
        opinion = ask_sbatch(f"#!/bin/bash\n#SBATCH {option}\ntrue\n")
        assert opinion.refused, opinion
        assert told in explain_refusal(opinion.said, config), opinion.said
    assert not ask_sbatch("#!/bin/bash\ntrue\n").refused


def test_a_controller_that_is_silent_has_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stub = tmp_path / "sbatch"
    stub.write_text("#!/bin/sh\necho 'sbatch: error: Unable to contact slurm controller' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    opinion = ask_sbatch("#!/bin/bash\n")
    assert not opinion.refused and "Unable to contact" in opinion.said
