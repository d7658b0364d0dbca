"""The native loop with a model's own tool calls: tools, readable refusals, and a finish for every end."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.agents.loop_format import NativeFormat
from prorl_hpc.agents.repetition import SameAgain, ends_in_repetition
from prorl_hpc.agents.tool_formats import get_tool_format, tag_format
from prorl_hpc.agents.tool_loop import LoopOutcome, ToolLoop
from prorl_hpc.agents.tools import TOOLS, make_tools
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import SamplingParams
from prorl_hpc.messages.trajectory import Finish, Message, ToolCall, Trajectory
from prorl_hpc.sandbox.fake import FakeSandbox
from prorl_hpc.sandbox.protocol import SandboxSpec, ToolResult
from prorl_hpc.tasks.testing import ScriptedLLM, write_chat_model

HERMES = get_tool_format("hermes")


def call(name: str, **arguments: Any) -> str:
    return HERMES.write(ToolCall(name, arguments))


LS = call("bash", command="ls")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


def bash(command: str, files: dict[str, bytes]) -> ToolResult:
    if command == "sleep":
        return ToolResult("half", None, timed_out=True, seconds=5)
    return ToolResult("a.txt\n") if command == "ls" else ToolResult(f"{command}: not found\n", 127)


@pytest.fixture
def sandbox() -> FakeSandbox:
    tools = {"ipython": lambda arguments, files: "4", "edit": lambda arguments, files: f"{arguments['command']} done"}
    return FakeSandbox(SandboxSpec("s0"), bash, tools)


async def search(query: str, timeout_s: float) -> str:
    if query == "down":
        raise OSError("connection refused")
    return f"found {query}"


async def play(
    chat: ChatFormat,
    sandbox: FakeSandbox,
    turns: Any,
    *,
    stop: list[str] | None = None,
    loop: Any = None,
    **settings: Any,
) -> tuple[LoopOutcome, Trajectory]:
    limits = {"max_context_tokens": 8192, "max_turn_tokens": 1000, "max_rollout_tokens": 0}
    limits |= {name: settings.pop(name) for name in list(settings) if name in limits}
    conversation = TokenConversation(
        chat, ScriptedLLM(chat, turns), SamplingParams(max_tokens=4000, stop=stop or []), **limits
    )
    tools = make_tools(settings.pop("tools", TOOLS), search)
    native = loop or ToolLoop(NativeFormat(HERMES), settings.pop("max_turns", 8), tools=tools, **settings)
    outcome = await native.run(conversation, sandbox, [Message("user", "?")])
    return outcome, conversation.trajectory


def replies(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages[1:] if message.role != "assistant"]


# every end


async def test_a_turn_without_call_is_the_answer(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    outcome, trajectory = await play(chat, sandbox, [LS, "<think>so</think>It is a.txt."])
    assert (outcome.answer, outcome.turns, trajectory.finish) == ("It is a.txt.", 2, Finish.ANSWER)


async def test_finish_gives_the_answer_and_ends(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    turn = f"{LS}\n{call('finish', answer='a.txt')}\n{call('bash', command='rm')}"
    outcome, trajectory = await play(chat, sandbox, [turn], max_turns=1)
    assert (outcome.answer, trajectory.finish) == ("a.txt", Finish.ANSWER)
    assert sandbox.calls == [("bash", {"command": "ls"})]


async def test_plain_chat_is_a_loop_without_tools(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    outcome, trajectory = await play(chat, sandbox, ["Hello."], tools=[])
    assert (outcome.answer, trajectory.finish) == ("Hello.", Finish.ANSWER)
    assert "tool" not in trajectory.messages[0].content


@pytest.mark.parametrize("last", [LS, call("finish"), "<tool_call>{</tool_call>"])
async def test_turns_are_used_up(chat: ChatFormat, sandbox: FakeSandbox, last: str) -> None:
    outcome, trajectory = await play(chat, sandbox, [LS, last], max_turns=2)
    assert (outcome.answer, outcome.turns, trajectory.finish) == (None, 2, Finish.TURNS)


async def test_a_malformed_turn_ends_it_where_the_task_says_so(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    outcome, trajectory = await play(chat, sandbox, ["<tool_call>ls</tool_call>"], stop_at_malformed=True)
    assert (outcome.malformed, trajectory.finish) == (1, Finish.MALFORMED)


async def test_a_stop_string_ends_it(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    outcome, trajectory = await play(chat, sandbox, ["I give up"], stop=["give up"])
    assert (outcome.answer, trajectory.finish) == (None, Finish.STOP_STRING)


@pytest.mark.parametrize("turn", [LS, "<tool_call>ls</tool_call>", call("nano")])
async def test_the_same_turn_with_the_same_result_ends_it(chat: ChatFormat, sandbox: FakeSandbox, turn: str) -> None:
    outcome, trajectory = await play(chat, sandbox, lambda prompt: turn, max_repeats=3)
    assert (outcome.turns, trajectory.finish) == (3, Finish.REPETITION)


async def test_a_turn_that_goes_round_in_circles_ends_it(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    _, trajectory = await play(chat, sandbox, ["Let me see. " + "I must look again. " * 20], max_repeats=3)
    assert trajectory.finish is Finish.REPETITION


async def test_other_results_are_no_repetition(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    turns = [LS, LS, call("bash", command="x"), LS, LS, "Done."]
    outcome, trajectory = await play(chat, sandbox, turns, max_repeats=3)
    assert (outcome.turns, trajectory.finish) == (6, Finish.ANSWER)


@pytest.mark.parametrize(
    ("limits", "finish"),
    [
        ({"max_turn_tokens": 4}, Finish.TURN_TOKENS),
        ({"max_rollout_tokens": 4}, Finish.ROLLOUT_TOKENS),
        ({"max_context_tokens": 20}, Finish.CONTEXT),
    ],
)
async def test_cuts_are_neither_run_nor_answers(
    chat: ChatFormat, sandbox: FakeSandbox, limits: dict[str, int], finish: Finish
) -> None:
    outcome, trajectory = await play(chat, sandbox, [LS], tools=[], max_repeats=2, **limits)
    assert (outcome.answer, trajectory.finish, trajectory.truncated) == (None, finish, True)
    assert not sandbox.calls


async def test_used_up_rollout_tokens_end_it_before_another_turn(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    tokens = len(chat.encode_text(LS)) + 1
    outcome, trajectory = await play(chat, sandbox, [LS], max_rollout_tokens=tokens)
    assert (outcome.turns, trajectory.finish) == (1, Finish.ROLLOUT_TOKENS)


@pytest.mark.parametrize(
    ("turns", "settings", "finish"),
    [
        (["<bash>ls</bash>", "answer: 4"], {}, Finish.ANSWER),
        (["hm"], {"stop_at_malformed": True}, Finish.MALFORMED),
        (["hm", "<bash>ls</bash>"], {"max_turns": 2}, Finish.TURNS),
        (["hm", "hm"], {"max_repeats": 2}, Finish.REPETITION),
    ],
)
async def test_text_formats_note_the_same_ends(
    chat: ChatFormat, sandbox: FakeSandbox, turns: list[str], settings: dict[str, Any], finish: Finish
) -> None:
    loop = ToolLoop(tag_format(), **{"max_turns": 4, **settings})
    _, trajectory = await play(chat, sandbox, turns, loop=loop)
    assert trajectory.finish is finish


# calls


async def test_several_calls_of_one_turn_are_answered_one_by_one(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    turn = "\n".join(
        [
            LS,
            call("ipython", code="2+2"),
            call("edit", command="view", path="a.txt", view_from=1),
            call("think", thought="hm"),
            call("web_search", query="kiwi"),
        ]
    )
    outcome, trajectory = await play(chat, sandbox, [turn, "Done."])
    tools = [m for m in trajectory.messages if m.role == "tool"]
    assert [m.name for m in tools] == ["bash", "ipython", "edit", "think", "web_search"]
    assert [m.content for m in tools] == ["a.txt", "4", "view done", "(noted)", "found kiwi"]
    assert (outcome.tool_calls, outcome.failed_calls) == (5, 0)


async def test_what_is_wrong_comes_back_and_stays_in_the_trajectory(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    turns = [
        '<tool_call>{"name": "bash"',
        call("bahs", command="ls"),
        call("bash", code="ls"),
        f"{LS}\n{LS}",
        f"{LS}\n<tool_call>ls</tool_call>",
        call("bash", command="sleep"),
        call("bash", command="x"),
        call("web_search", query="down"),
        "Done.",
    ]
    outcome, trajectory = await play(chat, sandbox, turns, max_turns=20)
    told = replies(trajectory)
    assert told[0].startswith("error: a <tool_call> is cut off before its JSON ends: write <tool_call>{")
    assert told[1].startswith("error: there is no tool 'bahs' (did you mean bash?); tools: bash, ipython, edit")
    assert told[2] == "error: bash: unknown argument 'code'; it takes command (string)"
    assert told[3:5] == ["a.txt", "error: bash is called twice in one turn with the same arguments: it runs once"]
    assert told[5].startswith("a.txt\nerror: a <tool_call> is not JSON")
    assert told[6:] == [
        "half\n(no end within 5 s: it was ended)",
        "x: not found\n(exit code 127)",
        "the search does not answer: connection refused\n(exit code 1)",
    ]
    written = [m.content for m in trajectory.messages if m.role == "assistant"]
    assert written == turns
    assert (outcome.malformed, outcome.failed_calls, outcome.answer) == (2, 6, "Done.")


async def test_every_reply_is_cut_to_the_limit(chat: ChatFormat, sandbox: FakeSandbox) -> None:
    loop = ToolLoop(NativeFormat(HERMES, limit_chars=20), 2)
    _, trajectory = await play(chat, sandbox, [call("bash", command="y" * 50), "Done."], loop=loop)
    assert "characters cut" in replies(trajectory)[0]


def test_tools_are_made_by_name() -> None:
    assert list(make_tools(["edit", "bash"])) == ["edit", "bash"]
    with pytest.raises(ConfigError, match="'bahs', which is no tool: did you mean bash"):
        make_tools(["bahs"])
    with pytest.raises(ConfigError, match=r"task\.web_search_url is empty"):
        make_tools(["web_search"])


def test_an_unknown_format_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"model\.tool_format=hermez is no known format: did you mean hermes\?"):
        get_tool_format("hermez")


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ("a" * 200, True),
        ("ab " * 60, True),
        ("So. " + "I look again at it. " * 7, True),
        ("I look again at it. " * 7 + "Done.", False),
        ("ha" * 10, False),
        ("-" * 80, False),
        (" ".join(map(str, range(300))), False),
        ("", False),
        ("x" * 100_000, True),
    ],
)
def test_repetition_is_found_at_the_end_of_a_text(text: str, repeats: bool) -> None:
    assert ends_in_repetition(text, 3) == repeats


def test_turns_that_are_the_same_are_counted_in_a_row() -> None:
    again = SameAgain(2)
    assert [again.add(turn) for turn in "abbac"] == [False, False, True, False, False]
    assert not any(SameAgain(0).add("a") for _ in range(9))
