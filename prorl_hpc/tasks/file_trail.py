"""The default task: find the number that a file gives, or that the file gives which it points to.

The question names one file. Its text is a number, or the name of the file to read next; only reading tells which,
so the agent must call the tool, look at what came back, and decide whether to go on. Numbers are random and decoy
files hold others; the reward is 1 for exactly the right number and 0 otherwise. The prompt shows trails of one and
two files; rows have up to three. Held-out rows use other file names and other wordings than the training rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.file_quest import FileQuest

DECOYS = 2
"""Files beside those of the trail."""
FILES = {
    "train": ("notes", "list", "data", "items", "stock", "shop", "log", "store", "farm", "crates", "desk", "report"),
    "heldout": ("prices", "stall", "garden", "market", "cellar", "sheet", "kitchen", "tools"),
}
QUESTIONS = {
    "train": ("What number is in {file}?", "Which number does {file} give?", "Find the number of {file}."),
    "heldout": ("Tell me the number that {file} has.", "I need the number from {file}."),
}
EXAMPLES: tuple[tuple[str, tuple[tuple[str, str], ...], str], ...] = (
    ("What number is in age.txt?", (("cat age.txt", "number 5132"),), "5132"),
    ("What number is in cars.txt?", (("cat cars.txt", "see poem.txt"), ("cat poem.txt", "number 2847")), "2847"),
)
"""Worked examples of the prompt: question, (command, output) of each turn, answer. Their files occur in no row."""


class FileTrail(FileQuest):
    """An AgentHandler. Rows as in file_quest; ``kind`` is the number of files on the trail."""

    kinds: ClassVar[Sequence[str]] = ("1", "2", "3")

    def draw(self, source: random.Random, split: str, kind: str) -> dict[str, Any]:
        length = int(kind)
        names = [f"{stem}.txt" for stem in source.sample(FILES[split], length + DECOYS)]
        numbers = [str(number) for number in source.sample(range(1000, 10000), len(names))]
        files = {name: f"number {number}\n" for name, number in zip(names, numbers, strict=True)}
        for here, there in pairwise(names[:length]):
            files[here] = f"see {there}\n"
        return {
            "kind": kind,
            "question": source.choice(QUESTIONS[split]).format(file=names[0]),
            "files": files,
            "answer": numbers[length - 1],
        }

    def worked_examples(self) -> list[Message]:
        messages = [Message("system", "Use bash.")]
        for question, turns, answer in EXAMPLES:
            messages.append(Message("user", question))
            for command, output in turns:
                messages += [Message("assistant", f"<bash>{command}</bash>"), self.observation(output)]
            messages.append(Message("assistant", f"answer: {answer}"))
        return messages
