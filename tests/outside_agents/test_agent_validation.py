"""What is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from outside_bed import CONF, settings

from prorl_hpc.cli.preflight_data import data_problems, data_warnings
from prorl_hpc.config.agent_validation import agent_errors
from prorl_hpc.config.schema import AgentConfig, ProrlConfig
from prorl_hpc.tasks.file_quest import FileQuest

GOOD = {"kind": "outside", "name": "a", "command": ["a", "{instruction}"]}


def errors(agent: dict[str, object], **sandbox: object) -> list[str]:
    config = ProrlConfig(agent=settings(agent))
    for name, value in sandbox.items():
        setattr(config.sandbox, name, value)
    return list(agent_errors(config))


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_agents_are_valid(path: Path) -> None:
    given = yaml.safe_load(path.read_text())
    assert errors(given) == []
    assert given["name"] == path.stem


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "remote"}, "agent.kind=remote: must be one of native, outside"),
        ({"command": []}, "agent.command=[]: must be the program"),
        ({"command": [" "]}, "must be the program of agent a"),
        (
            {"command": ["a", "{prompt}"]},
            "agent.command has {prompt}, which nothing is filled in for: there are {instruction}",
        ),
        ({"env": {"URL": "{url}"}}, "agent.env.URL has {url}"),
        ({"env": {"A-B": ""}}, "agent.env: 'A-B' must be the name of an environment variable"),
        ({"answer": "answer.txt"}, "agent.answer=answer.txt: must be last_message, stdout, or file:NAME"),
        ({"answer": "file:"}, "agent.answer=file:: must be"),
        ({"answer": "file:/etc/passwd"}, "agent.answer=file:/etc/passwd: must be"),
        ({"files": {"../a": ""}}, "agent.files: '../a' must be the name of a file in the workspace"),
        ({"binds": ["venv"]}, "agent.binds: 'venv' must be an absolute path"),
        ({"binds": ["/a:/b:rw"]}, "agent.binds: '/a:/b:rw' must be"),
        ({"max_calls": 0}, "agent.max_calls=0: must be at least 1"),
        ({"max_tokens": -1}, "agent.max_tokens=-1: must be a number of tokens, or 0"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, object], said: str) -> None:
    (error,) = errors({**GOOD, **changes})
    assert said in error


def test_braces_of_shells_json_and_templates_stay() -> None:
    command = ["sh", "-c", '${home} {{name}} {"a": 1} {} {instruction}']
    assert list(agent_errors(ProrlConfig(agent=AgentConfig(kind="outside", name="a", command=command)))) == []


def test_settings_of_a_program_without_one_are_refused() -> None:
    (error,) = errors({"kind": "native", "image": "agents", "binds": ["/a"]})
    assert error.startswith("agent.image and agent.binds have no effect with agent.kind=native")


def test_warm_sandboxes_have_no_door() -> None:
    (error,) = errors(GOOD, warm=2)
    assert error.startswith("sandbox.warm=2:") and "set sandbox.warm=0" in error


class Wordless(FileQuest):
    """A task that cannot be told."""

    instruction = None  # type: ignore[assignment]


def test_preflight_names_a_task_without_words_and_a_directory_that_is_not_there() -> None:
    config = ProrlConfig(agent=AgentConfig(kind="outside", name="a", command=["a"], binds=["/nowhere/venv"]))
    config.task.name = "test_agent_validation:Wordless"
    config.sandbox.kind = "local"
    problems = list(data_problems(config))
    assert any("has no method instruction(row)" in problem and "agent=native" in problem for problem in problems)
    assert any(problem.startswith("agent.binds: there is no directory /nowhere/venv") for problem in problems)


def test_preflight_looks_for_the_agents_image() -> None:
    config = ProrlConfig(agent=AgentConfig(kind="outside", name="a", command=["a"], image="/nowhere/agents.sif"))
    config.sandbox.kind = "apptainer"
    assert any(
        problem.startswith("agent.image: ") and "/nowhere/agents.sif" in problem for problem in data_problems(config)
    )


@pytest.mark.parametrize(
    ("command", "changes", "reached"),
    [
        ("/opt/venv/bin/a", {}, False),
        ("/opt/venv/bin/a", {"binds": ["/opt/other"]}, False),
        ("/opt/venv/bin/a", {"binds": ["/opt/venv"]}, True),
        ("/opt/venv/bin/a", {"binds": ["/shared/venv:/opt/venv"]}, True),
        ("/opt/venv/bin/a", {"image": "/images/agents.sif"}, True),
        ("/usr/bin/a", {}, True),
        ("a", {}, True),
    ],
)
def test_a_program_that_the_host_image_does_not_have_is_told_before_launch(
    command: str, changes: dict[str, object], reached: bool
) -> None:
    config = ProrlConfig(agent=settings({**GOOD, "command": [command], **changes}))
    for kind, told in (("apptainer", data_problems), ("auto", data_warnings), ("local", data_problems)):
        config.sandbox.kind = kind
        found = [
            text for text in told(config) if text.startswith("agent.command: /opt/venv/bin/a is not in the sandbox")
        ]
        assert len(found) == (0 if reached or kind == "local" else 1)


def test_an_agent_is_warned_of_a_short_context_and_of_rows_that_are_held_out() -> None:
    config = ProrlConfig(agent=settings(GOOD))
    config.model.max_context_tokens = 4095
    config.task.train.path = "rows.jsonl"
    held, short = data_warnings(config)
    assert held.startswith("task.heldout.path is not given: task.heldout.size=64 rows of rows.jsonl, at most a tenth")
    assert short.startswith("model.max_context_tokens=4095 is small for agent a")
    config.model.max_context_tokens, config.task.heldout.path = 4096, "heldout.jsonl"
    assert list(data_warnings(config)) == []


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_shipped_agent_has_its_key_among_its_arguments(path: Path) -> None:
    assert not any("{key}" in word for word in yaml.safe_load(path.read_text()).get("command", []))
