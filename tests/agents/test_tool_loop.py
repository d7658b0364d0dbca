"""The native loop: calls reach the sandbox, mistakes come back as text, and it always ends."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.agents.tool_formats import TextFormat, cut_middle, fence_format, tag_format
from prorl_hpc.agents.tool_loop import LoopOutcome, ToolLoop
from prorl_hpc.agents.tools import make_tools
from prorl_hpc.messages.errors import InferenceError, SandboxError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Message, ToolCall
from prorl_hpc.sandbox.fake import FakeSandbox
from prorl_hpc.sandbox.protocol import SandboxSpec, ToolResult
from prorl_hpc.tasks.testing import ScriptedLLM, write_chat_model


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


def bash(command: str, files: dict[str, bytes]) -> ToolResult:
    """Knows ``cat FILE`` and ``sleep``, which never ends in time."""
    name, *arguments = command.split()
    if name == "sleep":
        return ToolResult("", None, timed_out=True, seconds=5)
    if name != "cat":
        return ToolResult(f"bash: {name}: command not found\n", 127)
    if arguments[0] not in files:
        return ToolResult(f"cat: {arguments[0]}: No such file or directory\n", 1)
    return ToolResult(files[arguments[0]].decode())


@pytest.fixture
def sandbox() -> FakeSandbox:
    sandbox = FakeSandbox(SandboxSpec("s0"), bash)
    sandbox.files["x.txt"] = b"kiwi 7\n"
    return sandbox


async def play_loop(
    chat: ChatFormat, sandbox: FakeSandbox, turns: Any, loop: ToolLoop | None = None, **limits: int
) -> tuple[LoopOutcome, list[Message]]:
    bounds = {"max_context_tokens": 4096, "max_turn_tokens": 200, **limits}
    conversation = TokenConversation(chat, ScriptedLLM(chat, turns), SamplingParams(), **bounds)
    outcome = await (loop or ToolLoop(tag_format(), max_turns=4)).run(conversation, sandbox, [Message("user", "?")])
    return outcome, conversation.trajectory.messages


async def test_a_call_then_an_answer(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    outcome, messages = await play_loop(chat, sandbox, ["<bash>cat x.txt</bash>", "answer: 7"])
    assert outcome == LoopOutcome("7", turns=2, tool_calls=1, outputs=["kiwi 7"])
    assert [m.content for m in messages] == ["?", "<bash>cat x.txt</bash>", "kiwi 7", "answer: 7"]
    assert sandbox.calls == [("bash", {"command": "cat x.txt"})]


async def test_mistakes_come_back_as_readable_text(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    turns = ["I think it is 7", "<bash>nano x.txt</bash>", "<bash>cat y.txt</bash>", "answer: none"]
    outcome, messages = await play_loop(chat, sandbox, turns)
    said = [m.content for m in messages if m.role == "user"]
    assert said[1].startswith("error: write one command like <bash>")
    assert said[2:] == ["bash: nano: command not found", "cat: y.txt: No such file or directory"]
    assert (outcome.malformed, outcome.tool_calls, outcome.failed_calls) == (1, 2, 2)


async def test_an_unknown_tool_never_reaches_the_sandbox(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    loop = ToolLoop(tag_format(), max_turns=2, tools=make_tools(["ipython"]))
    outcome, messages = await play_loop(chat, sandbox, ["<bash>cat x.txt</bash>", "answer: 7"], loop)
    assert messages[2].content == "error: there is no tool 'bash'; tools: ipython"
    assert sandbox.calls == []
    assert outcome.failed_calls == 1


async def test_it_ends_at_max_turns_without_a_last_call(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    outcome, messages = await play_loop(chat, sandbox, lambda prompt: "<bash>cat x.txt</bash>")
    assert (outcome.turns, outcome.tool_calls, outcome.answer) == (4, 3, None)
    assert messages[-1].role == "assistant"


async def test_it_ends_at_the_first_malformed_turn_where_the_task_says_so(
    chat: ChatFormat, sandbox: FakeSandbox
) -> None:
    outcome, _ = await play_loop(chat, sandbox, ["hm"], ToolLoop(tag_format(), 4, stop_at_malformed=True))
    assert (outcome.turns, outcome.malformed, outcome.answer) == (1, 1, None)


async def test_a_cut_turn_is_neither_run_nor_an_answer(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    written = "<bash>cat x.txt</bash>"
    outcome, _ = await play_loop(chat, sandbox, [written], max_turn_tokens=len(chat.encode_text(written)))
    assert (outcome.turns, outcome.tool_calls, outcome.answer) == (1, 0, None)


async def test_it_ends_when_an_observation_does_not_fit(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    sandbox.files["x.txt"] = b"z" * 900
    outcome, messages = await play_loop(chat, sandbox, ["<bash>cat x.txt</bash>"], max_context_tokens=120)
    assert (outcome.turns, outcome.answer) == (1, None)
    assert messages[-1].role == "assistant"


async def test_a_call_that_times_out_is_told(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    _, messages = await play_loop(chat, sandbox, ["<bash>sleep 60</bash>", "answer: 1"])
    assert messages[2].content == "error: no end within 5 s"


async def test_only_broken_parts_raise(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    with pytest.raises(InferenceError):
        await play_loop(chat, sandbox, [InferenceError("gone")])
    await sandbox.stop()
    with pytest.raises(SandboxError):
        await play_loop(chat, sandbox, ["<bash>cat x.txt</bash>"])


@pytest.mark.parametrize(
    ("format_", "text", "step"),
    [
        (tag_format(), " <bash> ls -l </bash>\n", ToolCall("bash", {"command": "ls -l"})),
        (tag_format(), "<bash>a\nb</bash>", ToolCall("bash", {"command": "a\nb"})),
        (tag_format(), "<bash>  </bash>", None),
        (tag_format(), "<bash>a</bash><bash>b</bash>", None),
        (tag_format(), "sure: <bash>a</bash>", None),
        (tag_format(), "<bash>a", None),
        (tag_format(), "", None),
        (tag_format(), "answer: 4 5 ", "4 5"),
        (tag_format(), "answer:", None),
        (tag_format(), "the answer: 4", None),
        (fence_format(), "```bash\nls\ncat x\n```", ToolCall("bash", {"command": "ls\ncat x"})),
        (fence_format(), "```python\nls\n```", None),
        (fence_format(), "```bash\na\n```\n```bash\nb\n```", None),
    ],
)
def test_parsing(format_: TextFormat, text: str, step: ToolCall | str | None) -> None:
    parsed = format_.parse(text)
    assert bool(parsed.problem) == (step is None)
    if step is not None:
        assert (parsed.calls or parsed.content) == ((step,) if isinstance(step, ToolCall) else step)


def test_observations_are_cut_and_never_empty() -> None:
    format_ = tag_format(limit_chars=20)
    assert format_.observation(ToolCall("bash"), ToolResult("")).content == "(empty)"
    assert format_.observation(ToolCall("bash"), ToolResult("", 3)).content == "error: exit code 3"
    assert (
        format_.observation(ToolCall("bash"), ToolResult("x" * 30)).content
        == "xxxxxxxxxx\n[… 10 characters cut …]\nxxxxxxxxxx"
    )
    assert cut_middle("abc", 3) == "abc"
