"""The default task: answer a question about a file that only the tool can read.

Each row holds a small file of random words and numbers and asks for one of its numbers, so that the answer is
in no prompt and in no model's memory. The reward is 1 only for exactly the right answer, else 0: there is
nothing to be had for the form alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prorl_hpc.agents.tool_formats import tag_format
from prorl_hpc.agents.tool_loop import LoopOutcome, ToolLoop
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext
from prorl_hpc.tasks.registry import check_options
from prorl_hpc.tasks.rows import in_split, require

_ITEMS = [
    "kiwi",
    "plum",
    "pear",
    "lime",
    "fig",
    "date",
    "apple",
    "mango",
    "grape",
    "melon",
    "lemon",
    "peach",
    "cherry",
    "olive",
    "onion",
    "pea",
    "bean",
    "corn",
    "rice",
    "oat",
]
_FILES = ["notes", "list", "data", "items", "stock", "shop", "log", "store", "farm", "crates"]
_SYSTEM = "Use bash."
_ANSWER = "answer: "


@dataclass(frozen=True)
class _Kind:
    """A kind of question, and the worked example that shows it."""

    question: str
    command: str
    example_file: str
    example_item: str
    example_output: str
    example_answer: str


KINDS: dict[str, _Kind] = {
    "only": _Kind("What number is in {file}?", "cat {file}", "age.txt", "", "dog 5132", "5132"),
    "first": _Kind("What is the first number in {file}?", "head -1 {file}", "cars.txt", "", "red 2847", "2847"),
    "count": _Kind("How many lines are in {file}?", "wc -l {file}", "poem.txt", "", "26 poem.txt", "26"),
    "item": _Kind(
        "What is the number of {item} in {file}?", "grep {item} {file}", "pets.txt", "cow", "cow 3891", "3891"
    ),
    "last": _Kind("What is the last number in {file}?", "tail -1 {file}", "names.txt", "", "tom 7604", "7604"),
}


class FileQuest:
    """An AgentHandler. Rows: id, question, files (name → content), answer, kind."""

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ("kinds",))
        self._kinds = [str(kind) for kind in task.options.get("kinds") or KINDS]
        for kind in self._kinds:
            if kind not in KINDS:
                raise ConfigError(f"task.options.kinds has {kind!r}; allowed: {', '.join(KINDS)}")
        self._loop = ToolLoop(tag_format(task.observation_limit_chars), task.max_turns)

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        source = random.Random(f"{split} {seed}")
        rows: list[dict[str, Any]] = []
        while len(rows) < size:
            row = _draw(source, self._kinds[len(rows) % len(self._kinds)])
            if in_split(split, repr(row["files"])):
                rows.append({"id": f"{split}-{seed}-{len(rows)}", **row})
        return rows

    def check_row(self, row: Mapping[str, Any]) -> None:
        require(row, "question", str)
        require(row, "answer", str)
        require(row, "kind", str)
        for name, content in require(row, "files", dict).items():
            if not isinstance(name, str) or not name or name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"field files has the name {name!r}: expected a path inside the sandbox's workspace")
            if not isinstance(content, str):
                raise ValueError(f"field files.{name} is a {type(content).__name__}, expected a str")

    async def init(self, context: RolloutContext) -> None:
        for name, content in context.spec.row["files"].items():
            await context.sandbox.upload(name, content.encode())

    async def run(self, context: RolloutContext) -> None:
        messages = [*worked_examples(), Message("user", context.spec.row["question"])]
        context.notes["outcome"] = await self._loop.run(context.require_conversation(), context.sandbox, messages)

    async def eval(self, context: RolloutContext) -> Evaluation:
        outcome: LoopOutcome = context.notes["outcome"]
        right = outcome.answer is not None and outcome.answer == context.spec.row["answer"]
        return Evaluation(1.0 if right else 0.0, outcome.metrics())


def worked_examples() -> list[Message]:
    """The prompt before the question: each kind once, with its command, output and answer."""
    messages = [Message("system", _SYSTEM)]
    for kind in KINDS.values():
        names = {"file": kind.example_file, "item": kind.example_item}
        messages += [
            Message("user", kind.question.format(**names)),
            Message("assistant", f"<bash>{kind.command.format(**names)}</bash>"),
            Message("user", kind.example_output),
            Message("assistant", _ANSWER + kind.example_answer),
        ]
    return messages


def _draw(source: random.Random, kind: str) -> dict[str, Any]:
    file = f"{source.choice(_FILES)}.txt"
    items = source.sample(_ITEMS, 1 if kind == "only" else source.randint(5, 9))
    numbers = source.sample(range(1000, 10000), len(items))
    index = {"first": 0, "only": 0, "last": -1}.get(kind, source.randrange(len(items)))
    answer = len(items) if kind == "count" else numbers[index]
    return {
        "question": KINDS[kind].question.format(file=file, item=items[index]),
        "files": {file: "".join(f"{item} {number}\n" for item, number in zip(items, numbers, strict=True))},
        "answer": str(answer),
        "kind": kind,
    }
