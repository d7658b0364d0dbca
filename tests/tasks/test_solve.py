"""The task ``solve``: answers and checks are scored, rows are checked, tools are the row's or the task's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.tool_formats import get_tool_format
from prorl_hpc.config.schema import DataConfig, SandboxConfig, TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Finish, ToolCall
from prorl_hpc.sandbox.factory import make_runtime
from prorl_hpc.sandbox.fake import FakeSandbox
from prorl_hpc.sandbox.protocol import SandboxSpec, ToolResult
from prorl_hpc.tasks.answers import choice, exact, final_answer, last_number, numeric
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.protocol import wants_fresh_sandbox
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.tasks.solve import Solve
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model

TASK = TaskConfig(name="solve", train=DataConfig(size=12), heldout=DataConfig(size=6, seed=1))
ROW = {"id": "r", "prompt": "What is 6 * 7?", "answer": "42", "compare": "numeric"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("model")))


def bash(command: str, files: dict[str, bytes]) -> ToolResult:
    """Knows ``touch``, ``test -f`` as the task writes it, and a check of a file's content."""
    if command.startswith("make"):
        files["out.txt"] = b"right"
        return ToolResult("")
    if "test -f" in command:
        return ToolResult("", 0 if command.split()[-1] in files else 1)
    if "check" in command:
        return ToolResult("", 0 if files.get("out.txt") == files.get("expected.txt", b"right") else 1)
    return ToolResult("", 127)


def sandbox() -> FakeSandbox:
    return FakeSandbox(SandboxSpec("s"), bash)


def make() -> str:
    return get_tool_format("hermes").write(ToolCall("bash", {"command": "make"}))


@pytest.mark.parametrize(("answer", "reward"), [("It is 42.", 1.0), ("answer: 42", 1.0), ("41", 0.0), ("", 0.0)])
async def test_an_answer_is_compared(chat: ChatFormat, answer: str, reward: float) -> None:
    evaluation, _ = await play(Solve(TASK), ROW, sandbox(), chat, ScriptedLLM(chat, [answer]))
    assert evaluation.reward == reward
    assert evaluation.metrics["turns"] == 1


@pytest.mark.parametrize(("turns", "reward"), [(["done"], 0.0), ([make(), "done"], 1.0)])
async def test_a_check_runs_where_the_agent_was(chat: ChatFormat, turns: list[str], reward: float) -> None:
    row = {"id": "r", "prompt": "Make out.txt.", "check": "check"}
    evaluation, _ = await play(Solve(TASK), row, sandbox(), chat, ScriptedLLM(chat, turns))
    assert evaluation.reward == reward


@pytest.mark.parametrize(("turns", "reward"), [(["done"], 0.0), ([make(), "done"], 1.0)])
async def test_a_check_in_a_fresh_sandbox_sees_the_agents_outputs(
    chat: ChatFormat, turns: list[str], reward: float
) -> None:
    row = {
        "id": "r",
        "prompt": "Make out.txt.",
        "files": {"in.txt": "x"},
        "check": "check",
        "check_files": {"expected.txt": "right"},
        "fresh": True,
        "outputs": ["out.txt"],
    }
    handler, first, second = Solve(TASK), sandbox(), sandbox()
    assert wants_fresh_sandbox(handler, row)
    assert not wants_fresh_sandbox(handler, ROW)
    evaluation, _ = await play(handler, row, first, chat, ScriptedLLM(chat, turns), eval_sandbox=second)
    assert evaluation.reward == reward
    assert "expected.txt" not in first.files
    assert set(second.files) - {"out.txt"} == {"in.txt", "expected.txt"}


async def test_tools_and_system_prompt_are_the_rows_or_the_tasks(chat: ChatFormat) -> None:
    async def prompt(task: TaskConfig, **row: Any) -> tuple[str, str]:
        llm = ScriptedLLM(chat, ["42"])
        _, conversation = await play(Solve(task), {**ROW, **row}, sandbox(), chat, llm)
        return conversation.trajectory.messages[0].content, chat.decode(llm.calls[0][0])

    _, told = await prompt(TASK)
    assert '"bash"' in told
    assert '"ipython"' not in told
    _, told = await prompt(dataclasses.replace(TASK, tools=["ipython", "finish"]))
    assert '"ipython"' in told
    assert '"finish"' in told
    for system, told in (
        await prompt(dataclasses.replace(TASK, tools=["none"])),
        await prompt(TASK, tools=[]),
    ):
        assert '"bash"' not in told
        assert "answer:" in system
    assert (await prompt(dataclasses.replace(TASK, system_prompt="Be brief.")))[0] == "Be brief."
    assert (await prompt(dataclasses.replace(TASK, system_prompt="Be brief."), system="Be long."))[0] == "Be long."


def test_the_built_in_rows_are_good_and_apart() -> None:
    assert get_handler("solve", TASK).generate_rows("train", 12, 0) == load_rows(TASK, "train")
    heldout = load_rows(TASK, "heldout")  # refuses an overlap with train
    assert {"answer" in row for row in heldout} == {True, False}
    with pytest.raises(ConfigError, match=r"task\.train\.size="):
        Solve(TASK).generate_rows("train", 0, 0) or Solve(TASK).generate_rows("train", -1, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ""}, "field prompt is empty"),
        ({"answer": 42}, "field answer is a int"),
        ({"check": "true"}, "either field answer .* or field check"),
        ({"compare": "near"}, "field compare is 'near', expected one of exact, numeric, choice"),
        ({"tools": ["bahs"]}, "field tools has 'bahs', which is no tool: did you mean bash"),
        ({"tools": "bash"}, "field tools is a str"),
        ({"tools": ["web_search"]}, "task.web_search_url is empty"),
        ({"files": {"../x": ""}}, "field files has the name"),
        ({"files": {"x": 1}}, "field files.x is a int"),
        ({"outputs": ["/etc"]}, "field outputs has the name"),
        ({"fresh": True}, "no check"),
        ({"answer": "many"}, "field answer is 'many', expected a number.*compare is numeric"),
        ({"answer": "bb", "compare": "choice"}, "field answer is 'bb', expected a single letter"),
        ({"outputs": ["a"]}, "fresh and outputs go together"),
        ({"fresh": 1}, "expected true or false"),
        ({"system": 1}, "field system is a int"),
        ({"sytem": ""}, "field sytem is unknown"),
    ],
)
def test_rows_are_refused_by_field(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Solve(TASK).check_row({**ROW, **change})


def test_a_fresh_check_without_outputs_would_see_nothing() -> None:
    with pytest.raises(ValueError, match="fresh and outputs go together"):
        Solve(TASK).check_row({"id": "r", "prompt": "p", "check": "true", "fresh": True})


@pytest.mark.parametrize(
    ("answer", "compare"), [("a", "choice"), ("B", "choice"), ("2/3", "numeric"), ("50 %", "numeric")]
)
def test_answers_that_can_be_met(answer: str, compare: str) -> None:
    Solve(TASK).check_row({**ROW, "answer": answer, "compare": compare})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": {"compare": "near"}}, r"task\.options\.compare=near must be one of"),
        ({"options": {"check_timeout_s": 0}}, r"task\.options\.check_timeout_s=0 must be"),
        ({"options": {"kinds": []}}, r"task\.options\.kinds is not an option"),
    ],
)
def test_settings_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Solve(dataclasses.replace(TASK, **changes))


@pytest.mark.parametrize("name", ["solve", "file_quest", "file_trail"])
def test_a_row_can_be_told_to_an_outside_agent(name: str) -> None:
    handler = get_handler(name, dataclasses.replace(TASK, name=name))
    row = handler.generate_rows("train", 1, 0)[0]
    assert (row.get("prompt") or row.get("question")) in handler.instruction(row)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42 ", "42"),
        ("I add.\n**Answer:** 42.", "42"),
        ("The final answer is: (B)", "(B)"),
        ("answer: -5\nanswer: 50%", "50%"),
        (r"So \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{cut", r"\boxed{cut"),
        ("no marker: here", "no marker: here"),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("compare", "answer", "truth", "right"),
    [
        (exact, " a  b ", "a b", True),
        (exact, "A b", "a b", False),
        (numeric, "it is 1,234.50 m", "1234.5", True),
        (numeric, "2/3", "0.6666667", True),
        (numeric, "0.67", "2/3", False),
        (numeric, "50%", "0.5", True),
        (numeric, "-3e2", "-300", True),
        (numeric, "3 / 0", "3", False),
        (numeric, "none", "3", False),
        (numeric, "9" * 100, "3", False),
        (numeric, "0", "0", True),
        (choice, "(B)", "B", True),
        (choice, "b", "B", True),
        (choice, "It is C because", "C", True),
        (choice, "A or B", "A", False),
        (choice, "Because", "B", False),
    ],
)
def test_comparing(compare: Any, answer: str, truth: str, right: bool) -> None:
    assert compare(answer, truth) is right


def test_numbers_stay_quick() -> None:
    assert last_number("1" * 50_000) is None
    assert last_number("1e999") is not None


async def test_every_tool_works_in_a_real_sandbox(chat: ChatFormat, tmp_path: Path) -> None:
    def call(name: str, **arguments: object) -> str:
        return get_tool_format("hermes").write(ToolCall(name, dict(arguments)))

    row = {
        "id": "r",
        "prompt": "Sort in.txt into out.txt.",
        "files": {"in.txt": "b\na\n"},
        "check": "sort in.txt | cmp - out.txt && grep -q a expected.txt",
        "check_files": {"expected.txt": "a"},
        "fresh": True,
        "outputs": ["out.txt", "missing.txt"],
    }
    turns = [
        call("bash", command="sort in.txt > out.txt; cd /; exit 3"),
        call("ipython", code="print(open('out.txt').read())\n6 * 7"),
        call("edit", command="view", path="out.txt", view_from=1.0),
        call("edit", command="str_replace", path="out.txt", old="zzz", new="y"),
        call("think", thought="Good.") + call("finish", answer="done"),
    ]
    task = dataclasses.replace(TASK, tools=["bash", "ipython", "edit", "think", "finish"], max_turns=9)
    runtime = await make_runtime(SandboxConfig(kind="local"), tmp_path / "sandboxes", "solve-test")
    try:
        first, second = await runtime.start(SandboxSpec("a")), await runtime.start(SandboxSpec("b"))
        llm = ScriptedLLM(chat, turns)
        evaluation, conversation = await play(Solve(task), row, first, chat, llm, eval_sandbox=second)
    finally:
        await runtime.close()
    replies = [m.content for m in conversation.trajectory.messages if m.role == "tool"]
    assert evaluation.reward == 1.0
    assert "(exit code 3)" in replies[0]
    assert "a\nb" in replies[1]
    assert "42" in replies[1]
    assert "1" in replies[2]
    assert "b" in replies[2]
    assert "(exit code" in replies[3]
    assert (evaluation.metrics["tool_calls"], evaluation.metrics["failed_calls"]) == (6, 2)
    assert conversation.finish is Finish.ANSWER
