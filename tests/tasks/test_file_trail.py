"""The default task: the truth lies at the end of a trail of files, and nothing else is rewarded."""

from __future__ import annotations

import dataclasses

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import DataConfig
from prorl_hpc.config.store import compose
from prorl_hpc.sandbox.fake import FakeSandbox, cat
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.file_trail import DECOYS, EXAMPLES, FILES, QUESTIONS, FileTrail
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model

TASK = dataclasses.replace(compose([]).task, train=DataConfig(size=300), heldout=DataConfig(size=120, seed=1))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_answer_is_at_the_end_of_the_trail_and_in_no_prompt(split) -> None:
    rows = load_rows(TASK, split)
    assert {row["kind"] for row in rows} == {"1", "2", "3"}
    for row in rows:
        name = (
            next(word.strip("?.") for word in row["question"].split() if ".txt" in word).removesuffix(".txt") + ".txt"
        )
        visited = [name]
        while (text := row["files"][name].split())[0] == "see":
            name = text[1]
            visited.append(name)
        assert text == ["number", row["answer"]]
        assert len(visited) == len(set(visited)) == int(row["kind"])
        assert len(row["files"]) == int(row["kind"]) + DECOYS
        assert row["answer"] not in row["question"]
        assert sum(row["answer"] in content for content in row["files"].values()) == 1


def test_the_splits_and_the_examples_share_nothing() -> None:
    assert not {*FILES["train"]} & {*FILES["heldout"]}
    assert not {*QUESTIONS["train"]} & {*QUESTIONS["heldout"]}
    shown = " ".join(word for _, turns, _ in EXAMPLES for pair in turns for word in pair).replace(".txt", "").split()
    assert not {*shown} & {*FILES["train"], *FILES["heldout"]}


ROW = {
    "id": "r",
    "kind": "2",
    "question": "What number is in a.txt?",
    "files": {"a.txt": "see b.txt\n", "b.txt": "number 4711\n", "c.txt": "number 1234\n"},
    "answer": "4711",
}


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["<bash>cat a.txt</bash>", "<bash>cat b.txt</bash>", "answer: 4711"], 1.0),
        (["<bash>cat b.txt</bash>", "answer: 4711"], 1.0),
        (["<bash>cat a.txt</bash>", "<bash>cat c.txt</bash>", "answer: 1234"], 0.0),
        (["<bash>cat a.txt</bash>", "answer: b.txt"], 0.0),
        (["answer: 5132"], 0.0),
        (["<bash>cat a.txt</bash>"] * 4, 0.0),
    ],
    ids=["follows", "knows-the-way", "decoy", "stops-early", "guesses", "never-answers"],
)
async def test_only_the_number_at_the_end_is_rewarded(chat: ChatFormat, turns, reward) -> None:
    sandbox = FakeSandbox(SandboxSpec("s0"), cat)
    evaluation, _ = await play(FileTrail(TASK), ROW, sandbox, chat, ScriptedLLM(chat, turns))
    assert evaluation.reward == reward
    assert evaluation.metrics["turns"] == len(turns)
