"""Solved and failed file_quest rollouts, written by rule: what the tiny model is warmed up on.

They are token ids in the very layout of a real rollout (the same ChatFormat, the same messages), so that
reinforcement learning goes on where the warm start ends.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.tasks.file_quest import FileQuest, draw_row
from prorl_hpc.tasks.file_quest_words import COMMANDS, KINDS

GUESS_SHARE = 0.4
"""Of the failed rollouts, those that guess a number without the tool; the others use the wrong command."""


class Demonstration(NamedTuple):
    """``trained`` marks the tokens that an assistant wrote; the ids begin with the shared prefix where there is one."""

    token_ids: list[int]
    trained: list[bool]


class Demonstrations:
    """A repeatable stream of demonstrations; rows of both splits, so that every word is seen."""

    def __init__(self, chat: ChatFormat, seed: int) -> None:
        self._chat = chat
        self._source = random.Random(seed)
        self._task = FileQuest(TaskConfig())
        self._examples = self._task.worked_examples()

    @property
    def prefix(self) -> list[int]:
        """What all prompts with the worked examples begin with."""
        one, other = (
            self._chat.first_prompt([*self._examples, Message("user", question)]) for question in ("What", "Tell me")
        )
        return one[: next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]

    def draw(self, right_share: float, *, with_examples: bool) -> Demonstration:
        """One rollout, right with probability ``right_share``."""
        row = self._draw_row()
        right = self._source.random() < right_share
        turns = self.right_turns(row) if right else self._wrong_turns(row)
        messages = [*(self._examples if with_examples else ()), Message("user", row["question"])]
        return self._tokenize(messages, turns)

    def draw_right(self) -> Demonstration:
        return self.draw(1.0, with_examples=True)

    def _draw_row(self) -> dict[str, Any]:
        return draw_row(self._source, self._source.choice(("train", "heldout")), self._source.choice(KINDS))

    def right_turns(self, row: dict[str, Any]) -> list[str]:
        """Command, output, answer."""
        return self._tool_turns(row["kind"], row)

    def _wrong_turns(self, row: dict[str, Any]) -> list[str]:
        if self._source.random() < GUESS_SHARE:
            return [f"answer: {self._source.randint(1000, 9999)}"]
        return self._tool_turns(self._source.choice([kind for kind in KINDS if kind != row["kind"]]), row)

    def _tool_turns(self, kind: str, row: dict[str, Any]) -> list[str]:
        ((file, content),) = row["files"].items()
        output, answer = run_command(kind, file, content)
        return [f"<bash>{COMMANDS[kind].format(file=file)}</bash>", output, f"answer: {answer}"]

    def _tokenize(self, messages: list[Message], turns: list[str]) -> Demonstration:
        """``turns``: the assistant's and the tool's, in turn."""
        ids = self._chat.first_prompt(messages)
        trained = [False] * len(ids)
        for place, text in enumerate(turns):
            if place % 2 == 0:
                new = [*self._chat.encode_text(text), self._chat.end_of_turn_id]
            else:
                new = self._chat.extension([self._task.observation(text)], ids[-1])
            ids = ids + new
            trained = trained + [place % 2 == 0] * len(new)
        return Demonstration(ids, trained)


def run_command(kind: str, file: str, content: str) -> tuple[str, str]:
    """What the command of ``kind`` prints, and the number in it."""
    lines = content.splitlines()
    match kind:
        case "lines":
            return f"{len(lines)} {file}", str(len(lines))
        case "words":
            return f"{len(content.split())} {file}", str(len(content.split()))
        case _:
            line = lines[0] if kind == "first" else lines[-1]
            return line, line.split()[-1]
