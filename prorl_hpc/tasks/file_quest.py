"""A task for small models: four kinds of question about a small text file that only the tool can read.

The answer is a number that is in no prompt and in no model's memory, since the file is drawn at random for
its row. The reward is 1 for exactly the right answer and 0 otherwise: there is nothing to be had for the
form alone. Held-out rows use other words, other file names and other wordings than the training rows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from prorl_hpc.agents.tool_formats import TextFormat
from prorl_hpc.agents.tool_loop import LoopOutcome, ToolLoop
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.answers import final_answer
from prorl_hpc.tasks.file_quest_words import EXAMPLES, FILES, KINDS, QUESTIONS, WORDS
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext
from prorl_hpc.tasks.registry import check_options
from prorl_hpc.tasks.rows import require

_SYSTEM = "Use bash."
_CALL = re.compile(r"<bash>([^<>\n]+)</bash>")
_ANSWER = re.compile(r"answer: (\S+)")


class FileQuest:
    """An AgentHandler. Rows: id, kind, question, files (name → content), answer.

    Option: ``kinds`` (which kinds of question are generated).
    """

    kinds: ClassVar[Sequence[str]] = KINDS

    def __init__(self, task: TaskConfig) -> None:
        check_options(task, ("kinds",))
        self._kinds = [str(kind) for kind in task.options.get("kinds") or self.kinds]
        for kind in self._kinds:
            if kind not in self.kinds:
                raise ConfigError(f"task.options.kinds has {kind!r}; allowed: {', '.join(self.kinds)}")
        self._format = TextFormat(
            _CALL,
            _ANSWER,
            example="<bash>cat a.txt</bash>",
            observation_prefix="output: ",
            limit_chars=task.observation_limit_chars,
            mark_cut=False,
        )
        self._loop = ToolLoop(
            self._format,
            task.max_turns,
            call_timeout_s=task.call_timeout_s,
            # A turn in no known form ends the rollout: its tokens would only teach more of the kind.
            stop_at_malformed=True,
            max_repeats=task.max_repeats,
        )

    def generate_rows(self, split: str, size: int, seed: int) -> list[dict[str, Any]]:
        source = random.Random(f"{split}:{seed}")
        return [
            {"id": f"{split}-{seed}-{number}", **self.draw(source, split, self._kinds[number % len(self._kinds)])}
            for number in range(size)
        ]

    def draw(self, source: random.Random, split: str, kind: str) -> dict[str, Any]:
        """One row of ``kind`` without its id."""
        return draw_row(source, split, kind)

    def check_row(self, row: Mapping[str, Any]) -> None:
        for field in ("kind", "question", "answer"):
            require(row, field, str)
        for name, content in require(row, "files", dict).items():
            if not isinstance(name, str) or not name or name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"field files has the name {name!r}: expected a path inside the sandbox's workspace")
            if not isinstance(content, str):
                raise ValueError(f"field files.{name} is a {type(content).__name__}, expected a str")

    def instruction(self, row: Mapping[str, Any]) -> str:
        """For outside agents."""
        return (
            f"{row['question']} It is in the current directory. End with a line that says answer: and the number alone."
        )

    async def init(self, context: RolloutContext) -> None:
        for name, content in context.spec.row["files"].items():
            await context.sandbox.upload(name, content.encode())

    async def run(self, context: RolloutContext) -> None:
        messages = [*self.worked_examples(), Message("user", context.spec.row["question"])]
        context.notes["outcome"] = await self._loop.run(context.require_conversation(), context.sandbox, messages)

    async def eval(self, context: RolloutContext) -> Evaluation:
        outcome: LoopOutcome = context.notes["outcome"]
        right = outcome.answer is not None and final_answer(outcome.answer) == context.spec.row["answer"]
        return Evaluation(1.0 if right else 0.0, outcome.metrics())

    def observation(self, output: str) -> Message:
        """The message in which the model sees a command's output."""
        return self._format.observation_of(output)

    def worked_examples(self) -> list[Message]:
        """The prompt before the question: each kind once, with its command, output and answer."""
        messages = [Message("system", _SYSTEM)]
        for example in EXAMPLES:
            messages += [
                Message("user", example.question),
                Message("assistant", f"<bash>{example.command}</bash>"),
                self.observation(example.output),
                Message("assistant", f"answer: {example.answer}"),
            ]
        return messages


def draw_row(source: random.Random, split: str, kind: str) -> dict[str, Any]:
    """One row without its id: a random file, a question of ``kind`` about it, and the answer."""
    file = f"{source.choice(FILES[split])}.txt"
    lines = [_draw_line(source, split) for _ in range(source.randint(12, 60))]
    words = " ".join(lines).split()
    answers = {"first": lines[0].split()[-1], "last": words[-1], "lines": str(len(lines)), "words": str(len(words))}
    return {
        "kind": kind,
        "question": source.choice(QUESTIONS[split][kind]).format(file=file),
        "files": {file: "\n".join(lines) + "\n"},
        "answer": answers[kind],
    }


def _draw_line(source: random.Random, split: str) -> str:
    """One to three words and a number."""
    words = source.choices(WORDS[split], k=source.randint(1, 3))
    return f"{' '.join(words)} {source.randint(1000, 9999)}"
