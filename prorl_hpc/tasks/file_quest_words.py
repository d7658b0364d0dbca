"""The words of the file_quest task. Nothing is shared between the splits but the kinds of question."""

from __future__ import annotations

from typing import NamedTuple

COMMANDS = {
    "first": "head -n 1 {file}",
    "lines": "wc -l {file}",
    "last": "tail -n 1 {file}",
    "words": "wc -w {file}",
}
"""Kind of question → a command whose output holds the answer."""
KINDS = tuple(COMMANDS)

_TRAIN_WORDS = (
    "kiwi plum pear lime fig date apple mango grape melon lemon peach cherry olive onion pea bean corn rice oat"
)
_HELDOUT_WORDS = "tea salt sugar milk bread cheese honey butter egg nut cake soup"
WORDS = {"train": _TRAIN_WORDS.split(), "heldout": _HELDOUT_WORDS.split()}

_TRAIN_FILES = "notes list data items stock shop log store farm crates"
_HELDOUT_FILES = "prices desk report stall garden market cellar sheet"
FILES = {"train": _TRAIN_FILES.split(), "heldout": _HELDOUT_FILES.split()}

QUESTIONS = {
    "train": {
        "first": ["What is the first number in {file}?", "Which number is on the first line of {file}?"],
        "last": ["What is the last number in {file}?", "Which number is on the last line of {file}?"],
        "lines": ["How many lines are in {file}?", "How many lines does {file} have?"],
        "words": ["How many words are in {file}?", "How many words does {file} have?"],
    },
    "heldout": {
        "first": ["Tell me the first number of {file}."],
        "last": ["Tell me the last number of {file}."],
        "lines": ["Tell me how many lines {file} has."],
        "words": ["Tell me how many words {file} has."],
    },
}


class Example(NamedTuple):
    """A worked example of the prompt; its file and words occur in no row."""

    question: str
    command: str
    output: str
    answer: str


EXAMPLES = (
    Example("What is the first number in cars.txt?", "head -n 1 cars.txt", "red 2847", "2847"),
    Example("How many lines are in poem.txt?", "wc -l poem.txt", "26 poem.txt", "26"),
    Example("What is the last number in names.txt?", "tail -n 1 names.txt", "tom 7604", "7604"),
    Example("How many words are in pets.txt?", "wc -w pets.txt", "58 pets.txt", "58"),
)
