"""Settings of the agent loop that cannot work are refused before anything starts."""

from __future__ import annotations

import pytest

from prorl_hpc.config.schema import AgentConfig, ModelConfig, PolicyConfig, ProrlConfig, TaskConfig
from prorl_hpc.config.tool_validation import tool_errors, unused_tools

SEARCH = "https://search.example.org/?q={query}"


def errors(tool_format: str = "auto", **task: object) -> list[str]:
    return list(tool_errors(ProrlConfig(model=ModelConfig(tool_format=tool_format), task=TaskConfig(**task))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"tools": ["bash", "ipython", "edit", "think", "finish"]},
        {"tools": ["none"]},
        {"tools": ["web_search"], "web_search_url": SEARCH},
        {"max_repeats": 2, "max_rollout_tokens": 100, "stop": ["END"]},
    ],
)
def test_what_works_is_let_through(task: dict[str, object]) -> None:
    assert errors(**task) == []


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"tools": ["bahs"]}, "task.tools has 'bahs', which is no tool (did you mean bash?): there are bash, ipython"),
        ({"tools": ["none", "bash"]}, "none must be alone"),
        ({"tools": ["bash", "bash"]}, "task.tools has bash 2 times"),
        ({"tools": ["web_search"]}, "task.web_search_url is empty"),
        ({"web_search_url": "https://search.example.org"}, "with {query}"),
        ({"web_search_url": "file:///{query}"}, "must be an http or https URL"),
        ({"max_repeats": 1}, "task.max_repeats=1: must be 0 (never), or 2 or more"),
        ({"max_repeats": -1}, "task.max_repeats=-1"),
        ({"max_rollout_tokens": -1}, "task.max_rollout_tokens=-1"),
        ({"stop": ["a", ""]}, "task.stop has an empty text"),
    ],
)
def test_what_cannot_work_is_refused(task: dict[str, object], said: str) -> None:
    [error] = errors(**task)
    assert said in error


def test_formats_are_checked_for_every_policy() -> None:
    [error] = errors("hermez")
    assert error.startswith("model.tool_format=hermez: must be one of auto, hermes")
    config = ProrlConfig(policies={"b": PolicyConfig(model=ModelConfig(tool_format="xml"))})
    [error] = list(tool_errors(config))
    assert error.startswith("policies.b.model.tool_format=xml: must be one of")
    [error] = errors("bash_block", tools=["bash", "edit"])
    assert error == "model.tool_format=bash_block can call bash alone, but task.tools has edit too"


def test_tools_are_told_to_be_for_those_who_take_them() -> None:
    def told(name: str, tools: list[str], kind: str = "native") -> list[str]:
        return list(unused_tools(ProrlConfig(task=TaskConfig(name=name, tools=tools), agent=AgentConfig(kind=kind))))

    assert told("solve", ["edit"]) == told("my:Task", ["edit"]) == told("file_quest", []) == []
    assert told("solve", ["bash"], "outside") == []
    (warning,) = told("file_quest", ["edit"])
    assert "no effect with task.name=file_quest" in warning and "task=solve" in warning
    (warning,) = told("solve", ["bash", "edit"], "outside")
    assert "no effect with agent.kind=outside" in warning
