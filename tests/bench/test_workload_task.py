from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.bench.workload_task import TASK_NAME, WorkloadTask
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.messages.inference import Completion, FinishReason, VersionSpan
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.sandbox.fake import FakeSandbox
from prorl_hpc.sandbox.protocol import ToolResult
from prorl_hpc.tasks.protocol import RolloutContext
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model

ROW: dict[str, Any] = {
    "id": "a",
    "kind": "swe",
    "turns": [{"tokens": 5, "tool_s": 0.25}, {"tokens": 3}],
    "observation_chars": 40,
    "prompt_tokens": 20,
}
TASK = WorkloadTask(TaskConfig(TASK_NAME, max_turn_tokens=256))


def sleeping_bash(command: str, files: dict[str, bytes]) -> ToolResult:
    """Knows the workload's tool call, without the wait."""
    found = re.fullmatch(r"(?:sleep [\d.]+; )?cat (\S+)", command)
    assert found is not None, command
    return ToolResult(files[found[1]].decode())


def cut(tokens: int) -> Completion:
    """A turn that ended because its caller wanted no more."""
    return Completion([9] * tokens, [0.0] * tokens, FinishReason.LENGTH, [VersionSpan(0, 0, tokens)])


def ended(tokens: int) -> Completion:
    return msgspec.structs.replace(cut(tokens), finish_reason=FinishReason.STOP)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path_factory.mktemp("chat")))


async def test_each_turn_is_as_long_as_the_row_says_and_is_answered_by_a_tool_call(chat: ChatFormat) -> None:
    sandbox, llm = FakeSandbox(bash=sleeping_bash), ScriptedLLM(chat, [cut(5), cut(3)])
    evaluation, conversation = await play(TASK, ROW, sandbox, chat, llm)
    assert [sampling.max_tokens for _, sampling in llm.calls] == [5, 3]
    commands = [arguments["command"] for _, arguments in sandbox.calls]
    assert commands == ["sleep 0.250; cat observation.txt", "cat observation.txt"]
    assert len(sandbox.files["observation.txt"]) == 40
    told = conversation.trajectory.messages[-2].content
    assert sandbox.files["observation.txt"].decode() in told
    assert conversation.finish is Finish.ANSWER
    numbers = evaluation.metrics
    assert (numbers["turns"], numbers["tool_calls"], numbers["tool_asked_s"]) == (2, 2, 0.25)


async def test_a_recorded_run_time_is_slept_in_the_tool_calls(chat: ChatFormat) -> None:
    row = ROW | {"turns": [{"tokens": 5}, {"tokens": 3}], "run_s": 600.0}
    sandbox, llm = FakeSandbox(bash=sleeping_bash), ScriptedLLM(chat, [cut(5), cut(3)])
    evaluation, _ = await play(TASK, row, sandbox, chat, llm)
    first, second = (float(arguments["command"].split()[1].rstrip(";")) for _, arguments in sandbox.calls)
    assert 200 < first <= 300
    assert 500 < second <= 600, "the fake does not sleep: what the first call left over is made up for"
    assert evaluation.metrics["tool_asked_s"] == pytest.approx(first + second, abs=0.01)


async def test_a_workload_that_does_not_fit_the_context_fails_and_names_the_settings(chat: ChatFormat) -> None:
    sandbox, llm = FakeSandbox(bash=sleeping_bash), ScriptedLLM(chat, [cut(5), cut(3)])
    with pytest.raises(ValueError, match=r"turn 2 of 2 does not fit \(context\): raise model.max_context_tokens"):
        await play(TASK, ROW | {"observation_chars": 5000}, sandbox, chat, llm, max_context_tokens=400)


def test_a_turn_that_the_task_does_not_allow_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"turn 2 of 2 is to have 300 tokens, .*=256 .*task.options.kinds.swe.turn_tokens"
    ):
        TASK.check_row(ROW | {"turns": [{"tokens": 256}, {"tokens": 300}]})


async def test_turns_that_the_engine_ends_before_their_time_are_counted(chat: ChatFormat) -> None:
    sandbox, llm = FakeSandbox(bash=sleeping_bash), ScriptedLLM(chat, [ended(4), cut(3)])
    evaluation, _ = await play(TASK, ROW, sandbox, chat, llm)
    assert (evaluation.metrics["turns"], evaluation.metrics["short_turns"]) == (2, 1)


async def test_a_tool_call_that_fails_is_the_sandboxes_fault(chat: ChatFormat) -> None:
    sandbox = FakeSandbox(bash=lambda command, files: ToolResult("sleep: not found", exit_code=127))
    with pytest.raises(SandboxError, match=r"exit code 127\): sleep: not found"):
        await play(TASK, ROW, sandbox, chat, ScriptedLLM(chat, [cut(5)]))


@pytest.mark.parametrize(("uniform", "rewards"), [(True, [1.0] * 4), (False, [0.0, 1.0, 0.0, 1.0])])
def test_rewards_of_a_group_differ_unless_the_row_is_uniform(uniform: bool, rewards: list[float]) -> None:
    async def reward(sample: int) -> float:
        spec = RolloutSpec("r", "t", ROW | {"uniform": uniform}, sample=sample)
        return (await TASK.eval(RolloutContext(spec, FakeSandbox(), notes={"numbers": {}}))).reward

    assert [asyncio.run(reward(sample)) for sample in range(4)] == rewards
