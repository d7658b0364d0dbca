"""What every tool format keeps to: what it writes it reads again, and nothing that a model writes makes it raise."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.agents.tool_formats import TOOL_FORMATS
from prorl_hpc.agents.tool_formats.reading import carriable_problem
from prorl_hpc.agents.turns import ParsedTurn, ToolFormat
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
names = st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True).filter(lambda name: name not in {"if", "in", "is", "or"})
calls = st.builds(ToolCall, names, st.dictionaries(texts, values, max_size=4))
bash_calls = st.builds(lambda command: ToolCall("bash", {"command": command}), texts)
MARKS = [
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "<think>", "</think>"),
    *(
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
        "<|start|>",
        "assistant",
        "<|call|>",
    ),
    *(
        "<|channel|>",
        "commentary",
        "analysis",
        "final",
        " to=functions.",
        "<|message|>",
        "<|end|>",
        "<|constrain|>json",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(
        "```bash\n",
        "```json\n",
        "```",
        "\n",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        ",",
        ";",
        ":",
        "=",
        "**",
        "\\",
        "\\ud800",
    ),
    *(
        '{"name": "f", ',
        '"name"',
        '"parameters": {',
        '"arguments": ',
        '"function": ',
        '"tool_calls": [',
        "f(a=",
        "[f(",
        "a",
    ),
    *("1", "1e999", "-", "NaN", "9" * 30, "9" * 5000, "true", "None", "type", "\0", "é"),
]
wild = st.lists(st.sampled_from(MARKS) | texts, max_size=14).map("".join)


pytestmark = pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)


def schema_for(call: ToolCall) -> ToolSchema:
    """A tool that takes exactly these arguments."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {name: {"type": kinds.get(type(value), "null")} for name, value in call.arguments.items()}
    return ToolSchema(call.name, "", {"type": "object", "properties": properties, "required": list(properties)})


def written(tool_format: ToolFormat, call: ToolCall) -> str | None:
    """None where the format says that it cannot."""
    try:
        return tool_format.write(call)
    except ValueError:
        return None


def check(parsed: ParsedTurn) -> None:
    """Whatever was read can go into messages and be shown."""
    msgspec.json.encode(parsed)
    msgspec.msgpack.encode(parsed)
    json.dumps([call.arguments for call in parsed.calls], allow_nan=False).encode()
    assert (not parsed.unreadable) or parsed.unreadable in parsed.problem
    assert len(parsed.problem) < 4000 or len(parsed.calls) > 1 or parsed.problem.count(";") > 5


def drawn(data: st.DataObject, tool_format: ToolFormat) -> ToolCall:
    return data.draw(bash_calls if tool_format.name == "bash_block" else calls)


@settings(deadline=None)
@given(data=st.data())
def test_a_written_call_is_read_again(tool_format: ToolFormat, data: st.DataObject) -> None:
    call = drawn(data, tool_format)
    if (text := written(tool_format, call)) is not None:
        assert tool_format.parse(text, [schema_for(call)]) == ParsedTurn("", calls=(call,))


@settings(deadline=None)
@given(data=st.data())
def test_thought_text_and_several_calls(tool_format: ToolFormat, data: st.DataObject) -> None:
    given_calls = [drawn(data, tool_format), drawn(data, tool_format)]
    texts_ = [written(tool_format, call) for call in given_calls]
    if None in texts_:
        return
    turn = "\n".join(["<think>Let me see.</think>", "First this.", *map(str, texts_)])
    parsed = tool_format.parse(turn)
    assert (parsed.content, parsed.reasoning) == ("First this.", "Let me see.")
    assert [call.name for call in parsed.calls] == [call.name for call in given_calls]
    if tool_format.name != "qwen_xml":  # which knows no types without tools
        assert list(parsed.calls) == given_calls
    assert bool(parsed.problem) == (given_calls[0] == given_calls[1])


@settings(deadline=None)
@given(data=st.data())
def test_no_beginning_of_a_turn_makes_it_raise(tool_format: ToolFormat, data: st.DataObject) -> None:
    call = drawn(data, tool_format)
    text = f"<think>So.</think>Now:\n{written(tool_format, call) or ''}"
    for end in range(len(text)):
        check(tool_format.parse(text[:end], [schema_for(call)]))


@settings(deadline=None)
@given(wild)
def test_nothing_makes_it_raise(tool_format: ToolFormat, text: str) -> None:
    for tools in ((), [ToolSchema("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}})]):
        check(tool_format.parse(text, tools))


@pytest.mark.parametrize(
    "unit", ["{", "[", "(", '{"name":', '{"a":[', "[f(a=[", "<tool_call>{", "<think>", "```bash\n", '"']
)
def test_long_nonsense_neither_raises_nor_takes_for_ever(tool_format: ToolFormat, unit: str) -> None:
    for opening in (
        "",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[f(a=",
        "<|channel|>commentary to=f<|message|>",
        "<tool_call><function=f>",
    ):
        check(tool_format.parse(opening + unit * 5000))


def test_a_cut_call_is_a_problem_and_no_call(tool_format: ToolFormat) -> None:
    text = tool_format.write(ToolCall("bash", {"command": "ls -l"}))
    for end in range(text.index("ls -l") + 1, text.index("ls -l") + 5):
        parsed = tool_format.parse(text[:end])
        assert not parsed.calls
        assert "cut off" in parsed.unreadable, parsed


def test_unknown_tools_wrong_arguments_and_repeated_calls_are_problems(tool_format: ToolFormat) -> None:
    bash = ToolCall("bash", {"command": "ls"})
    other = ToolSchema("bush", "", {"type": "object", "properties": {}})
    text = tool_format.write(bash)
    parsed = tool_format.parse(text, [other])
    assert parsed.calls == (bash,)
    assert parsed.problem == "there is no tool 'bash' (did you mean bush?); tools: bush"
    assert not parsed.unreadable
    counted = ToolSchema("bash", "", {"type": "object", "properties": {"command": {"type": "integer"}}})
    assert (
        "argument command is string, expected integer; it takes command (integer, optional)"
        in tool_format.parse(text, [counted]).problem
    )
    needy = ToolSchema(
        "bash", "", {"type": "object", "properties": {"command": {"type": "string"}, "why": {}}, "required": ["why"]}
    )
    assert "argument why is missing" in tool_format.parse(text, [needy]).problem
    assert (
        "argument 'command'"
        in tool_format.parse(text, [ToolSchema("bash", "", {"type": "object", "properties": {"code": {}}})]).problem
    )
    twice = tool_format.parse(f"{text}\n{text}")
    assert twice.calls == (bash, bash)
    assert "twice" in twice.problem


def test_text_without_calls_is_content(tool_format: ToolFormat) -> None:
    for text in ("The answer is 4.", 'In JSON: {"age": 4}', "See [1] and f(x) = [x].", "```python\nx = 1\n```", ""):
        assert tool_format.parse(text) == ParsedTurn(text)


@pytest.mark.parametrize(
    ("raw", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("\n<think>\na\n</think>\n\nb", "a", "b"),
        ("a</think>b", "a", "b"),  # the prompt opened the thought
        ("[THINK]a[/THINK]b", "a", "b"),
        ("<think>a", "a", ""),
        ("<think></think>b", "", "b"),
        ("b", "", "b"),
    ],
)
def test_thought_is_split_off(tool_format: ToolFormat, raw: str, reasoning: str, content: str) -> None:
    assert tool_format.parse(raw) == ParsedTurn(content, reasoning)


def test_the_end_of_a_thought_in_an_argument_splits_nothing(tool_format: ToolFormat) -> None:
    call = ToolCall("bash", {"command": "grep '</think>' log"})
    assert tool_format.parse(tool_format.write(call)) == ParsedTurn("", calls=(call,))


DEEP = 100_000
UNCARRIABLE = ['"\\ud800"', "1e999", "1" + "0" * 30, "9" * 5000, "[" * DEEP, "[" * 150 + "]" * 150]


@pytest.mark.parametrize("value", UNCARRIABLE, ids=["half_pair", "infinite", "large", "very_large", "deep", "closed"])
def test_what_no_message_can_carry_is_a_problem(tool_format: ToolFormat, value: str) -> None:
    if tool_format.name == "bash_block":  # has text alone, in which there are no such values
        with pytest.raises(ValueError):
            tool_format.write(ToolCall("f", {"a": {"b": value}}))
        return
    text = tool_format.write(ToolCall("f", {"a": {"b": "VALUE"}})).replace("'VALUE'", '"VALUE"')
    text = text.replace('\\"VALUE\\"', value.replace("\\", "\\\\").replace('"', '\\"')).replace('"VALUE"', value)
    parsed = tool_format.parse(text, [ToolSchema("f", "", {"properties": {"a": {"type": "object"}}})])
    assert parsed.problem
    assert not [
        call for call in parsed.calls if carriable_problem(call.arguments) or isinstance(call.arguments["a"], dict)
    ]
    check(parsed)


def test_a_half_pair_in_the_text_itself_is_a_problem(tool_format: ToolFormat) -> None:
    parsed = tool_format.parse(tool_format.write(ToolCall("bash", {"command": "ls HERE"})).replace("HERE", "\ud800"))
    assert not parsed.calls
    assert parsed.unreadable
