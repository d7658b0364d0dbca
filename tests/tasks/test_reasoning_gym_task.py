"""The second task: generators and scorer of the package reasoning-gym."""

from __future__ import annotations

import builtins
import dataclasses
from collections import Counter
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import DataConfig
from prorl_hpc.config.store import compose
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.sandbox.fake import FakeSandbox, cat
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model

TASK = dataclasses.replace(
    compose(["task=reasoning_gym"]).task, train=DataConfig(size=12), heldout=DataConfig(size=6, seed=0)
)


@pytest.fixture
def package() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")


@pytest.mark.usefixtures("package")
def test_splits_are_repeatable_and_share_nothing() -> None:
    train, heldout = load_rows(TASK, "train"), load_rows(TASK, "heldout")
    assert (len(train), len(heldout)) == (12, 6)
    assert load_rows(TASK, "train") == train
    assert not {r["question"] for r in train} & {r["question"] for r in heldout}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("right", "reward"), [(True, 1.0), (False, 0.0)])
async def test_the_packages_scorer_decides(tmp_path: Any, right: bool, reward: float) -> None:
    chat = ChatFormat.open(write_chat_model(tmp_path))
    row = load_rows(TASK, "train")[0]
    answer = row["entry"]["answer"] if right else "123456789"
    llm = ScriptedLLM(chat, ["<bash>cat x</bash>", f"answer: {answer}"])
    evaluation, _ = await play(get_handler("reasoning_gym", TASK), row, FakeSandbox(SandboxSpec("s0"), cat), chat, llm)
    assert evaluation.reward == reward


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "simple_equation"}, "not a dataset of reasoning-gym: near it: simple_equations"),
        ({"settings": {"nope": 1}}, r"task\.options\.settings=.*does not fit simple_equations.*nope"),
        ({"dataset": {"chain_sum": 0}}, r"task\.options\.dataset\.chain_sum=0: expected a weight"),
        ({"dataset": {"chain_sum": 1}, "settings": {"max_terms": 3}}, r"settings\.max_terms: of a mixture.*by dataset"),
        ({"data": "x"}, r"task\.options\.data is not an option .*did you mean dataset"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows(dataclasses.replace(TASK, options=options), "train")


@pytest.mark.usefixtures("package")
def test_a_mixture_has_its_shares_and_own_settings() -> None:
    options = {
        "dataset": {"chain_sum": 3, "leg_counting": 1},
        "settings": {"chain_sum": {"min_terms": 2, "max_terms": 2}},
    }
    rows = load_rows(dataclasses.replace(TASK, options=options), "train")
    assert Counter(row["dataset"] for row in rows) == {"chain_sum": 9, "leg_counting": 3}
    assert [row["dataset"] for row in rows] != sorted(row["dataset"] for row in rows)
    assert all(
        row["question"].count("+") + row["question"].count("-") <= 2 for row in rows if row["dataset"] == "chain_sum"
    )


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("partial", "reward"), [(True, 0.01), (False, 0.0)])
async def test_a_part_of_the_score_counts_if_asked_for(tmp_path: Any, partial: bool, reward: float) -> None:
    chat = ChatFormat.open(write_chat_model(tmp_path))
    task = dataclasses.replace(TASK, options={"dataset": "leg_counting", "partial": partial})
    row = load_rows(task, "train")[0]
    llm = ScriptedLLM(chat, ["answer: 123456789"])
    handler = get_handler("reasoning_gym", task)
    evaluation, _ = await play(handler, row, FakeSandbox(SandboxSpec("s0"), cat), chat, llm)
    assert evaluation.reward <= reward
    assert evaluation.reward == (evaluation.metrics["score"] if partial else 0.0)


@pytest.mark.usefixtures("package")
def test_a_generator_that_is_too_small_is_told() -> None:
    task = dataclasses.replace(TASK, options={"dataset": "coin_flip", "settings": {"min_trials": 3, "max_trials": 3}})
    with pytest.raises(ConfigError, match="different train problems of 12"):
        load_rows(task, "train")


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "reasoning_gym":
            raise ImportError("No module named 'reasoning_gym'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        get_handler("reasoning_gym", TASK)
