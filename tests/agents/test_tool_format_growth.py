"""Reading what a model wrote takes time in proportion to its length, whatever it wrote: it happens in the worker's loop.

Regular expressions have no counter of steps, so growth is told from the CPU time of texts that double in length; a text
that is read within the floor passes, however slow the machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from prorl_hpc.agents.tool_formats import TOOL_FORMATS
from prorl_hpc.agents.turns import ToolFormat
from prorl_hpc.messages.trajectory import ToolCall
from prorl_hpc.tasks.answers import final_answer, last_number

LONGEST = 25_600
FLOOR_S = 0.5
"""CPU time of a text that is not slow, at any length."""
MOST_GROWTH = 3.5
"""Of the time while the length doubles (linear: 2, quadratic: 4)."""
LENGTHS = [*range(16, 64, 6), *(LONGEST >> halvings for halvings in range(6, -1, -1))]
"""In characters. Few more at first: what grows exponentially is seen before it takes for ever."""

FILLERS = [
    " ",
    "\n",
    " \n",
    "\\",
    "\\a",
    '"',
    "'",
    "[",
    "{",
    "(",
    "`",
    "a",
    "=",
    "<",
    "1,",
    ". ",
    "* ",
    "a ",
    '{"a":',
    "</",
]
MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>", '<tool_call>{"name": '],
    "qwen_xml": ["<tool_call>", "<function=", "<function=a>", "<parameter=", "<parameter=a>", "</parameter>", "</function>"],
    "llama_json": ["<|python_tag|>", "<|python_tag|>a.call(", '{"name":', '{"type":1}', '"parameters":', ";", "<|eom_id|>"],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[a(", "\n[a(", "x=", 'x="', "**", "[a.b(x=1)]", "f'{"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]a", "[TOOL_CALLS]a[CALL_ID]", "[TOOL_CALLS]a[ARGS]{"],
    "deepseek": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>x", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "\n```json\n", "```",
    ],
    "harmony": [
        "<|start|>", "assistant", " to=", "to=", "<|channel|>", "<|channel|>analysis<|message|>", "commentary", "<|message|>",
        "<|constrain|>", "<|end|>", "<|call|>", "<|channel|>final<|message|>a<|end|>", "<|start|>assistant to=a",
    ],
    "bash_block": ["```bash\n", "```", "````sh\n", "\n```", "\n   ```"],
    "json": ["```", "```json\n", "``` [ ", '{"name":', '{"tool_calls":[', '{"id":1}', '"arguments":"{', "]"],
}  # fmt: skip
THOUGHTS = ["<think>", "</think>", "[THINK]", "[/THINK]"]


def cpu_seconds(read: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    read(text)
    return time.process_time() - start


def assert_grows_in_proportion(
    read: Callable[[str], object], head: str, unit: str, tail: str, lengths: Sequence[int] = LENGTHS
) -> None:
    before = 0.0
    for length in lengths:
        times = length // len(unit)
        text, most = head + unit * times + tail, max(FLOOR_S, MOST_GROWTH * before)
        took = cpu_seconds(read, text)
        for _ in range(3):  # a collection of garbage, a core that was slowed down: not every time
            if took > most:
                took = min(took, cpu_seconds(read, text))
        assert took <= most, (
            f"{head!r} + {unit!r} * {times} + {tail!r} takes {took:.2f} s, a shorter one {before:.2f} s"
        )
        before = took


def shapes(name: str, tool_format: ToolFormat) -> Iterator[tuple[str, str, str]]:
    """(head, unit that is repeated, tail)"""
    markers = [*MARKERS[name], *THOUGHTS]
    for marker in markers:
        yield "", marker, ""
    for marker, filler in itertools.product(markers, FILLERS):
        yield marker, filler, "x"
        yield "", marker + filler, ""
    turn = tool_format.write(ToolCall("bash", {"command": "a"}))
    for end, filler in itertools.product(range(0, len(turn), 5), FILLERS[:7]):
        yield turn[:end], filler, "x"


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_time_to_read_a_turn_grows_in_proportion(name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    for shape in shapes(name, tool_format):
        assert_grows_in_proportion(tool_format.parse, *shape)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_long_row_of_one_marker_is_read(name: str) -> None:
    for marker in [*MARKERS[name], *THOUGHTS]:
        assert_grows_in_proportion(TOOL_FORMATS[name].parse, "", marker, "", [12_500, 25_000, 50_000, 100_000])


@pytest.mark.parametrize("read", [final_answer, last_number])
def test_the_time_to_find_an_answer_grows_in_proportion(read: Callable[[str], object]) -> None:
    units = [
        *FILLERS,
        "the ",
        "final ",
        "answer",
        "answer: ",
        " :",
        "**",
        " *",
        "1",
        "1 ",
        "1,000",
        "1e",
        "1/",
        "\\boxed{",
    ]
    for head, unit, tail in itertools.product(
        ["", "answer", "the ", "answer: ", "answer: a", "1", "1/"], units, ["", "\0b"]
    ):
        assert_grows_in_proportion(read, head, unit, tail)
