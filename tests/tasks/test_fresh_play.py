"""The fakes play tasks that use several tools and are scored where the agent has never been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.trajectory import Message
from prorl_hpc.sandbox.fake import FakeSandbox
from prorl_hpc.sandbox.protocol import ToolResult
from prorl_hpc.tasks.file_quest import FileQuest
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model


class Patched(FileQuest):
    """RUN edits, EVAL applies the patch elsewhere."""

    eval_in_fresh_sandbox = True

    async def run(self, context: RolloutContext) -> None:
        context.require_conversation().append([Message("user", "fix it")])
        await context.require_conversation().generate()
        edited = await context.sandbox.call("edit", {"command": "create", "path": "a", "text": "new"}, 5)
        assert edited.exit_code == 0
        await context.sandbox.call("bash", {"command": "cat a", "shell": "second", "keep": True}, 5)
        context.notes["patch"] = (await context.sandbox.call("patch", {}, 5)).output

    async def eval(self, context: RolloutContext) -> Evaluation:
        assert isinstance(context.sandbox, FakeSandbox)
        return Evaluation(float(context.notes["patch"] == "a=new" and not context.sandbox.files))


def edit(arguments: dict[str, Any], files: dict[str, bytes]) -> ToolResult:
    files[arguments["path"]] = arguments["text"].encode()
    return ToolResult("")


def patch(arguments: dict[str, Any], files: dict[str, bytes]) -> str:
    return f"a={files['a'].decode()}"


async def test_play_scores_in_the_fresh_sandbox(tmp_path: Path) -> None:
    chat = ChatFormat.open(write_chat_model(tmp_path))
    handler = Patched(TaskConfig())
    row = handler.generate_rows("train", 1, 0)[0]
    sandbox = FakeSandbox(tools={"edit": edit, "patch": patch})
    evaluation, _ = await play(handler, row, sandbox, chat, ScriptedLLM(chat, ["x"]), eval_sandbox=FakeSandbox())
    assert evaluation.reward == 1.0
    assert [tool for tool, _ in sandbox.calls] == ["edit", "bash", "patch"]
    with pytest.raises(ValueError, match="give eval_sandbox"):
        await play(handler, row, sandbox, chat, ScriptedLLM(chat, ["x"]))


async def test_wrong_arguments_are_told() -> None:
    sandbox = FakeSandbox()
    for arguments in ({"command": "cat a", "shell": 1}, {"command": "cat a", "timeout": 3}, {"command": 1}):
        assert (await sandbox.call("bash", arguments, 5)).exit_code == 2
    assert "there are bash" in (await sandbox.call("search", {}, 5)).output
