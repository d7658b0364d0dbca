"""What is told of a file of one's own that is wrong: the file, and all that is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.cli import launch
from prorl_hpc.cli.composition import compose_all
from prorl_hpc.messages.errors import ConfigError


def told(directory: Path, text: str, *words: str, group: str = "cluster") -> tuple[Path, str]:
    """The file with ``text``, and what launch says to it."""
    file = directory / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_all(["--config-dir", str(directory), f"{group}=mine", *words], launch.OWN_FLAGS)
    return file, str(caught.value)


def test_every_mistake_of_a_site_file_is_told_with_the_file_and_beside_those_of_the_command_line(
    tmp_path: Path,
) -> None:
    text = "kind: slurm\ntime_minuts: 3\nrequeue: maybe\nrollout: {node: 3, cpus: x, extra: {wckey: rl}}\ntrainer: 3\n"
    file, said = told(tmp_path, text, "trainer.stps=3")
    assert said.startswith("6 things are wrong:")
    for words in (
        "there is no setting cluster.time_minuts; did you mean cluster.time_minutes?",
        "cluster.requeue: Value 'maybe'",
        "there is no setting cluster.rollout.node; did you mean cluster.rollout.nodes?",
        "cluster.rollout.cpus: Value 'x'",
        "cluster.trainer: Invalid type",
    ):
        assert f"{file}: {words}" in said
    assert "- there is no setting trainer.stps" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rollout: {nodes: 3\ntime_minutes: 5\n", ", line 2 is not YAML: while parsing a flow mapping, expected"),
        ("- kind\n", ": it must hold settings"),
        ("time_minutes: abc\n", ": cluster.time_minutes: Value 'abc' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_file_that_is_no_yaml_and_a_wrong_value_are_told_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    file, said = told(tmp_path, text)
    assert said.startswith(f"{file}{words}") and "\n" not in said


def test_a_file_of_the_whole_configuration_is_checked_as_that(tmp_path: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /model: tiny\ntrainer: {stepss: 3}\n"
    file, said = told(tmp_path, text, group="experiment")
    assert said.startswith(f"{file}: there is no setting trainer.stepss; did you mean trainer.steps?")
