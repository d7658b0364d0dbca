"""The example of docs/add-a-task.md is a task that works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import DataConfig, TaskConfig
from prorl_hpc.sandbox.fake import FakeSandbox
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "add-a-task.md"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskConfig:
    [code] = re.findall(r"```python\n(\"\"\"my_package/my_tasks\.py.*?)```", DOCUMENT.read_text(), re.DOTALL)
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "my_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    monkeypatch.delitem(sys.modules, "my_package.my_tasks", raising=False)
    sizes = {"train": DataConfig(size=8), "heldout": DataConfig(size=4, seed=1)}
    return TaskConfig(name="my_package.my_tasks:WordCount", **sizes)


async def test_the_documented_task_runs(task: TaskConfig, tmp_path: Path) -> None:
    row = load_rows(task, "train")[0]
    chat = ChatFormat.open(write_chat_model(tmp_path / "model"))
    for answer, reward in ((row["words"], 1.0), (row["words"] + 1, 0.0)):
        sandbox = FakeSandbox(SandboxSpec("s0"), lambda command, files: str(len(files["text.txt"].split())))
        llm = ScriptedLLM(chat, ["<bash>wc -w text.txt</bash>", f"answer: {answer}"])
        evaluation, _ = await play(get_handler(task.name, task), row, sandbox, chat, llm)
        assert evaluation.reward == reward
        assert sandbox.calls == [("bash", {"command": "wc -w text.txt"})]
