"""The default task: the truth is in the file alone, and only the exact answer is rewarded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import DataConfig, TaskConfig
from prorl_hpc.config.store import compose
from prorl_hpc.sandbox.fake import FakeSandbox, cat
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.file_quest import FileQuest
from prorl_hpc.tasks.file_quest_words import EXAMPLES, FILES, KINDS, QUESTIONS, WORDS
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model

TASK = dataclasses.replace(
    compose(["task=file_quest"]).task, train=DataConfig(size=200), heldout=DataConfig(size=100, seed=1)
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


def solve(row: dict[str, Any]) -> str:
    """The answer from the file's content, worked out independently of the generator."""
    [content] = row["files"].values()
    lines = [line.split() for line in content.splitlines()]
    match row["kind"]:
        case "first":
            return str(lines[0][-1])
        case "last":
            return str(lines[-1][-1])
        case "lines":
            return str(len(lines))
        case _:
            return str(sum(map(len, lines)))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_answer_is_what_the_file_says_and_in_no_prompt(split: Any) -> None:
    rows = load_rows(TASK, split)
    assert {row["kind"] for row in rows} == set(KINDS)
    for row in rows:
        assert row["answer"] == solve(row)
        assert row["answer"] not in row["question"]
    answers = [row["answer"] for row in rows if row["kind"] in ("first", "last")]
    assert len(set(answers)) > 0.9 * len(answers)


def test_the_splits_share_no_words_files_or_wordings() -> None:
    assert not {*WORDS["train"]} & {*WORDS["heldout"]}
    assert not {*FILES["train"]} & {*FILES["heldout"]}
    for kind in KINDS:
        assert not {*QUESTIONS["train"][kind]} & {*QUESTIONS["heldout"][kind]}
    shown = " ".join(f"{e.question} {e.output}" for e in EXAMPLES).replace(".txt", "").replace("?", "").split()
    assert not {*shown} & {*FILES["train"], *FILES["heldout"]}


def test_only_the_asked_kinds_are_generated() -> None:
    task = dataclasses.replace(TASK, options={"kinds": ["words", "last"]})
    assert {row["kind"] for row in load_rows(task, "train")} == {"words", "last"}


ROW = {
    "id": "r",
    "kind": "cat",
    "question": "What number is in a.txt?",
    "files": {"a.txt": "fig 4711\n"},
    "answer": "4711",
}


@pytest.mark.parametrize(
    ("turns", "reward", "answered"),
    [
        (["<bash>cat a.txt</bash>", "answer: 4711"], 1.0, 1),
        (["<bash>cat a.txt</bash>", "answer: 47111"], 0.0, 1),
        (["<bash>cat a.txt</bash>", "answer: fig 4711"], 0.0, 0),
        (["<bash>cat a.txt</bash>", "4711"], 0.0, 0),
        (["<bash>cat b.txt</bash>", "<bash>cat a.txt</bash>", "answer: 4711"], 1.0, 1),
        (["<bash>cat a.txt</bash>"] * 3, 0.0, 0),
        (["I will look"], 0.0, 0),
        (["<bash>cat a.txt</bash>", "answer: 4711" + " and more" * 30], 0.0, 0),
    ],
    ids=["right", "wrong", "two-words", "no-form", "second-try", "no-answer", "malformed", "too-long"],
)
async def test_only_the_exact_answer_is_rewarded(chat: ChatFormat, turns: Any, reward: float, answered: int) -> None:
    sandbox = FakeSandbox(SandboxSpec("s0"), cat)
    evaluation, conversation = await play(FileQuest(TASK), ROW, sandbox, chat, ScriptedLLM(chat, turns))
    assert evaluation.reward == reward
    assert evaluation.metrics["answered"] == answered
    assert evaluation.metrics["turns"] == len(turns)
    assert sandbox.files == {"a.txt": b"fig 4711\n"}
    assert [m.content for m in conversation.trajectory.messages if m.content.startswith("output: fig")][:1] == (
        ["output: fig 4711"] if sandbox.calls else []
    )


def test_the_prompt_shows_each_kind_once() -> None:
    examples = FileQuest(TaskConfig()).worked_examples()
    assert len(examples) == 1 + 4 * len(KINDS)
    assert examples[3].content == "output: red 2847"
