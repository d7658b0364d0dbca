"""What is looked at before processes are started in an image."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from fakes.container import in_container, make_image

from prorl_hpc import __version__
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.slurm import own_container_checks
from prorl_hpc.slurm.own_container_checks import Found, components_in_use, container_problems

needs_apptainer = pytest.mark.skipif(shutil.which("apptainer") is None, reason="needs Apptainer")


@pytest.fixture
def config(tmp_path: Path) -> ProrlConfig:
    made = ProrlConfig()
    made.cluster.kind = "slurm"
    made.sandbox.kind = "local"
    image = tmp_path / "all.sif"
    image.touch()
    made.cluster.container.image = str(image)
    return made


def test_nothing_to_say_without_images_and_from_a_login_node_with_a_good_one(config: ProrlConfig) -> None:
    assert container_problems(ProrlConfig()) == []
    assert container_problems(config) == []


def test_images_that_are_not_there_are_named_by_their_setting(config: ProrlConfig, tmp_path: Path) -> None:
    config.cluster.trainer.container = str(tmp_path / "train.sif")
    config.cluster.container.image = "docker://vllm/vllm-openai"
    first, second = container_problems(config)
    assert "cluster.container.image=docker://vllm/vllm-openai: must be a .sif file" in first
    assert f"cluster.trainer.container={tmp_path}/train.sif is not there" in second
    config.trainer.enabled = False
    config.cluster.inference.nodes = 0
    assert components_in_use(config) == ["rollout"]
    assert len(container_problems(config)) == 1


def test_workers_in_an_image_must_say_which_sandboxes_they_start(config: ProrlConfig) -> None:
    config.sandbox.kind = "auto"
    (problem,) = container_problems(config)
    assert "sandbox.kind=auto would quietly isolate nothing" in problem
    config.cluster.inference.container, config.cluster.container.image = config.cluster.container.image, ""
    assert container_problems(config) == []


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Found("", "", True), r"has no prorl_hpc: install it into the image"),
        (Found("0.0.9", "", True), rf"has prorl_hpc 0\.0\.9, this is {__version__}"),
        (Found(__version__, "", True), r"has no apptainer, which the sandboxes of its workers need"),
        (Found(__version__, "/usr/bin/apptainer", False), r"no user namespace can be made inside it"),
    ],
)
def test_what_an_image_lacks(config: ProrlConfig, monkeypatch: pytest.MonkeyPatch, found: Found, told: str) -> None:
    config.cluster.kind, config.sandbox.kind = "local", "apptainer"
    monkeypatch.setattr(own_container_checks, "look_into", lambda config, image: found)
    assert any(re.search(told, problem) for problem in container_problems(config))


@needs_apptainer
def test_a_real_image_is_looked_into(tmp_path: Path) -> None:
    config = in_container(ProrlConfig(), make_image(tmp_path / "image"))
    assert container_problems(config) == []
    config.cluster.container.python = "/usr/bin/no-such-python"
    (problem,) = container_problems(config)
    assert "/usr/bin/no-such-python cannot be started in it: FATAL" in problem
