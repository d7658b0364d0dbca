"""The spellings of each tool format that models use, and how vLLM's own parsers read the same turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prorl_hpc.agents.tool_formats import TOOL_FORMATS, get_tool_format
from prorl_hpc.agents.tool_formats.reading import carriable_problem
from prorl_hpc.agents.tools import TOOLS
from prorl_hpc.config.tool_validation import TOOL_FORMAT_NAMES, TOOL_NAMES
from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

BASH = ToolCall("bash", {"command": "ls"})
ADD = ToolCall("add", {"a": 1, "b": [True, None, "x"]})
TWO = [ToolSchema("bash"), ToolSchema("add")]


def test_the_names_that_the_configuration_allows_are_those_there_are() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_FORMAT_NAMES
    assert TOOLS == TOOL_NAMES


GOOD: list[tuple[str, str, tuple[ToolCall, ...], str]] = [
    ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}', (BASH,), ""),
    ("hermes", 'Hm.<tool_call>\n{"arguments": {"command": "ls"}, "name": "bash"}\n</tool_call>', (BASH,), "Hm."),
    ("hermes", '<tool_call>{"name": "bash", "parameters": {"command": "ls"}}</tool_call> ok', (BASH,), "ok"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>',
        (ToolCall("f", {"a": "line\nbreak"}),),
        "",
    ),
    ("qwen_xml", "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>", (BASH,), ""),
    ("qwen_xml", "<tool_call>\n<function=bash><parameter=command>ls</parameter></function>\n</tool_call>", (BASH,), ""),
    ("qwen_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", (ToolCall("f"),), ""),
    ("llama_json", '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}', (BASH,), ""),
    (
        "llama_json",
        '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "add", "arguments": {}}',
        (BASH, ToolCall("add")),
        "",
    ),
    ("llama_json", '{"type": "function", "function": {"name": "bash", "parameters": {"command": "ls"}}}', (BASH,), ""),
    ("llama_json", '<|python_tag|>brave_search.call(query="kiwi")', (ToolCall("brave_search", {"query": "kiwi"}),), ""),
    ("llama_json", 'I have {"name": "Bob", "age": 5}.', (), 'I have\n{"name": "Bob", "age": 5}\n.'),
    ("pythonic", "[bash(command='ls'), add(a=1, b=[True, None, 'x'])]", (BASH, ADD), ""),
    ("pythonic", '<|python_start|>[bash(command="ls")]<|python_end|>', (BASH,), ""),
    ("pythonic", "[add(a=1, b=[true, null, 'x'])]", (ADD,), ""),
    (
        "pythonic",
        "[f(a=-1.5, b={'c': ')]'}, d='''x\ny''')]",
        (ToolCall("f", {"a": -1.5, "b": {"c": ")]"}, "d": "x\ny"}),),
        "",
    ),
    ("pythonic", "[a.b(x=(1, 2))]", (ToolCall("a.b", {"x": [1, 2]}),), ""),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}, "id": "abcdefghi"}]',
        (ToolCall("bash", {"command": "ls"}, "abcdefghi"),),
        "",
    ),
    ("mistral", 'Ok[TOOL_CALLS]bash[ARGS]{"command": "ls"}[TOOL_CALLS]add[ARGS]{}', (BASH, ToolCall("add")), "Ok"),
    (
        "mistral",
        '[TOOL_CALLS]bash[CALL_ID]abcdefghi[ARGS]{"command": "ls"}',
        (ToolCall("bash", {"command": "ls"}, "abcdefghi"),),
        "",
    ),
    ("mistral", '[TOOL_CALLS]bash{"command": "ls"}', (BASH,), ""),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (BASH,),
        "",
    ),
    (
        "deepseek",
        'a</think>b<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (BASH, ToolCall("add")),
        "b",
    ),
    (
        "harmony",
        '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}',
        (BASH,),
        "",
    ),
    (
        "harmony",
        '<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.bash<|channel|>commentary json<|message|>{"command": "ls"}<|call|>',
        (BASH,),
        "I look.",
    ),
    ("harmony", ' to=functions.bash<|channel|>commentary <|constrain|>json<|message|>{"command": "ls"}', (BASH,), ""),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Done.",
        (),
        "Done.",
    ),
    ("bash_block", "I look:\n```bash\nls\n```\nthen", (ToolCall("bash", {"command": "ls"}),), "I look:\nthen"),
    ("bash_block", "```sh\ncat <<'E' > a\nx\nE\n```", (ToolCall("bash", {"command": "cat <<'E' > a\nx\nE"}),), ""),
    (
        "json",
        '{"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}}], "content": "Hm."}',
        (ToolCall("bash", {"command": "ls"}, "c1"),),
        "Hm.",
    ),
    ("json", '```json\n{"name": "bash", "arguments": {"command": "ls"}}\n```', (BASH,), ""),
    (
        "json",
        'So: [{"name": "bash", "arguments": {"command": "ls"}}, {"name": "add", "arguments": {}}]',
        (BASH, ToolCall("add")),
        "So:",
    ),
]


@pytest.mark.parametrize(("name", "raw", "calls", "content"), GOOD)
def test_good_turns(name: str, raw: str, calls: tuple[ToolCall, ...], content: str) -> None:
    parsed = get_tool_format(name).parse(raw)
    assert (parsed.calls, parsed.content, parsed.problem) == (calls, content, "")


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("hermes", "<tool_call>ls</tool_call>", "is not JSON"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": {}}}</tool_call>', "goes on with '}"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        (
            "hermes",
            '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>',
            "arguments that are a string, expected an object",
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "has NaN, which is not JSON"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 99999999999999999999}}</tool_call>',
            "more than 64 bits",
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        ("hermes", "<tool_call>", "is cut off"),
        ("hermes", '<tool_call>["bash"]</tool_call>', "is an array, expected a JSON object"),
        ("qwen_xml", "<tool_call>\nls\n</tool_call>", "names no tool"),
        (
            "qwen_xml",
            "<tool_call>\n<function=bash>\n<parameter=command>\nls",
            "its parameter command has no </parameter>",
        ),
        ("qwen_xml", "<tool_call>\n<function=bash>\nls\n</function>\n</tool_call>", "goes on with 'ls"),
        ("llama_json", '{"name": "bash", "parameters": "ls"}', "arguments that are a string"),
        ("llama_json", "<|python_tag|>print(1)", "is neither JSON nor NAME.call"),
        ("pythonic", "[bash('ls')]", "an argument without its name: \"'ls'\""),
        ("pythonic", "[bash(command=ls)]", "has 'ls' as a value, expected a literal"),
        ("pythonic", "[bash(command=f'{x}')]", "as a value, expected a literal"),
        ("pythonic", "[bash(command='ls']", "is cut off"),
        ("pythonic", "[bash(command={1: 2})]", "names are not all text"),
        ("mistral", "[TOOL_CALLS]bash ls", "is no call"),
        ("mistral", '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls', "is cut off"),
        ("mistral", '[TOOL_CALLS]["bash"]', "has a string in its list"),
        ("deepseek", "<｜tool▁calls▁begin｜>bash", "has no <｜tool▁call▁begin｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>bash<｜tool▁sep｜>ls<｜tool▁call▁end｜>", "is not JSON"),
        (
            "harmony",
            "<|channel|>commentary to=functions.bash <|message|>ls<|call|>",
            "the message to functions.bash is not JSON",
        ),
        ("harmony", "<|channel|>commentary to=functions.ba", "a head that is cut off"),
        ("bash_block", "```bash\nls", "close it with a line ```"),
        ("json", '{"tool_calls": [1]}', "has a number as a call"),
        ("json", '{"name": "bash", "arguments": "ls"}', "is not JSON"),
    ],
)
def test_bad_turns_are_told(name: str, raw: str, said: str) -> None:
    parsed = get_tool_format(name).parse(raw)
    assert said in parsed.unreadable
    assert parsed.problem == parsed.unreadable
    assert not parsed.calls


def test_the_readable_calls_of_a_turn_are_there_beside_the_others() -> None:
    text = get_tool_format("hermes").write
    raw = f"{text(BASH)}\n<tool_call>oh</tool_call>\n{text(ADD)}\nSo."
    parsed = get_tool_format("hermes").parse(raw, TWO)
    assert (parsed.calls, parsed.content) == ((BASH, ADD), "So.")
    assert parsed.problem.startswith("a <tool_call> is not JSON")


def test_qwen_xml_reads_values_by_their_types() -> None:
    kinds = {
        "s": "string",
        "i": "integer",
        "n": "number",
        "b": "boolean",
        "a": "array",
        "o": "object",
        "z": ["null", "string"],
    }
    tool = ToolSchema("f", "", {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}})
    given = {"s": "1", "i": "1", "n": "1.5", "b": "True", "a": "['x', None]", "o": '{"k": 1}', "z": "None"}
    raw = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items())
    parsed = get_tool_format("qwen_xml").parse(f"<function=f>\n{raw}</function>", [tool])
    wanted = {"s": "1", "i": 1, "n": 1.5, "b": True, "a": ["x", None], "o": {"k": 1}, "z": None}
    assert (parsed.calls, parsed.problem) == ((ToolCall("f", wanted),), "")
    wrong = get_tool_format("qwen_xml").parse("<function=f><parameter=i>one</parameter></function>", [tool])
    assert "argument i is string, expected integer" in wrong.problem


def test_formats_say_what_they_cannot_write() -> None:
    for name, call in {
        "qwen_xml": ToolCall("f", {"a": "</parameter>"}),
        "pythonic": ToolCall("not-a-name"),
        "bash_block": ToolCall("ipython", {"code": "1"}),
        "harmony": ToolCall("a b"),
        "deepseek": ToolCall("a\nb"),
    }.items():
        with pytest.raises(ValueError, match=rf"the format {name}|in the format {name}"):
            get_tool_format(name).write(call)


# vLLM's parsers

_VLLM = {
    "hermes": "hermes",
    "llama_json": "llama3_json",
    "pythonic": "pythonic",
    "deepseek": "deepseek_v31",
}
_MARKS = "<tool_call> </tool_call> <|python_tag|> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>"


class MarksOnly:
    """As much of a tokenizer as the parsers ask for before they read text."""

    def get_vocab(self) -> dict[str, int]:
        return {
            mark: i for i, mark in enumerate([*_MARKS.split(), "<｜tool▁sep｜>", "<|python_start|>", "<|python_end|>"])
        }

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.get_vocab().get(text, 99)]


@pytest.mark.parametrize("name", _VLLM)
@pytest.mark.parametrize("calls", [(BASH,), (ADD,), (BASH, ADD), ()], ids=["one", "nested", "two", "none"])
def test_vllm_reads_the_same_calls(name: str, calls: tuple[ToolCall, ...]) -> None:
    manager = pytest.importorskip("vllm.tool_parsers", reason="vLLM is not installed: nothing to compare with")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    parser = manager.ToolParserManager.get_tool_parser(_VLLM[name])(MarksOnly())
    raw = _turn(name, calls)
    theirs = parser.extract_tool_calls(raw, ChatCompletionRequest(messages=[], model="m"))
    read = [ToolCall(c.function.name, json.loads(c.function.arguments)) for c in theirs.tool_calls]
    ours = get_tool_format(name).parse(raw)
    assert read == list(ours.calls) == list(calls)
    assert (theirs.content or "").strip() == ours.content


def _turn(name: str, calls: tuple[ToolCall, ...]) -> str:
    """Several calls as this family writes them."""
    texts = [get_tool_format(name).write(call) for call in calls]
    if not texts:
        return "No tool is needed."
    if name == "pythonic":
        return f"[{', '.join(text[1:-1] for text in texts)}]"
    if name == "llama_json":
        return "; ".join(texts)
    if name == "deepseek":
        inner = [text.removeprefix("<｜tool▁calls▁begin｜>").removesuffix("<｜tool▁calls▁end｜>") for text in texts]
        return f"<｜tool▁calls▁begin｜>{''.join(inner)}<｜tool▁calls▁end｜>"
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("llama_json", '{"name": [1], "type": "x"}'),
        ("json", '{"name": [1], "type": "x"}'),
        ("pythonic", f"[f(0x{'f' * 9000})]"),
        ("pythonic", """[f(f"{'a' + chr(10)!r:{'}'}}" "\\n")]"""),
        ("pythonic", f"[a{'.a' * 2000}()]"),
    ],
)
def test_odd_turns_do_not_raise(name: str, raw: str) -> None:
    assert len(get_tool_format(name).parse(raw).problem) < 2000


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, None, True, "é", 1.5, {"b": -(2**63)}], "c": 2**64 - 1}, ""),
        ({"a": "\ud800"}, "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        ({"a": [2**64]}, "64 bits"),
        ({"a": -(2**63) - 1}, "64 bits"),
        ({"a": float("nan")}, "NaN"),
        ({"a": [float("-inf")]}, "infinite"),
        ({"a": {1: 2}}, "names"),
        ({"a": {1, 2}}, "set"),
    ],
)
def test_what_a_message_can_carry(value: object, problem: str) -> None:
    assert problem in carriable_problem(value)
    assert bool(problem) == bool(carriable_problem(value))


def test_nesting_that_no_stack_holds_can_be_told() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert "nested too deeply" in carriable_problem(value)
    while value:  # freed from the outside in, without recursion
        value = value.pop()  # type: ignore[assignment]
