"""A run's own configuration file: what it holds comes back as it was, and what cannot be is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.store import load, save


def test_words_of_the_shell_are_left_alone(tmp_path: Path) -> None:
    config = ProrlConfig()
    config.cluster.setup = ["export A=${B:-x} ${C##*/}", "#BB"]
    config.cluster.extra = {"comment": "1e3", "begin": "010", "wckey": "yes"}
    config.trainer.deepspeed = {"a": 1e-5, "b": [1, 2.5, True, None, "x"]}
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("run: {nme: x}", "run.nme"),
        ("cluster: {rollout: {nodes: 1, colour: red}}", "cluster.rollout.colour"),
        ("trainer: {steps: many}", r"\$\.trainer\.steps"),
        ("- a", "got `array`"),
        ("a: [", "flow node"),
    ],
)
def test_what_is_no_configuration_is_named(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.yaml is not the configuration of a run: .*{named}"):
        load(file)


def test_processes_of_a_run_load_it_without_omegaconf() -> None:
    look = "import sys, prorl_hpc.slurm.node; print('omegaconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout == "False\n"
