"""Tasks by name and by import path; wrong names are answered with near ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.tasks.file_quest import FileQuest
from prorl_hpc.tasks.registry import BUILT_IN, get_handler

OWN_TASK = """
class MyHandler:
    def __init__(self, task):
        self.task = task
    def generate_rows(self, split, size, seed):
        return []
    def check_row(self, row): ...
    async def init(self, context): ...
    async def run(self, context): ...
    async def eval(self, context): ...

class Half:
    def __init__(self, task): ...
    def generate_rows(self, split, size, seed): ...

class NoTask(MyHandler):
    def __init__(self): ...
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_own_task_module.py").write_text(OWN_TASK)
    (tmp_path / "my_broken_task_module.py").write_text("import no_such_package_here")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own_task_module", raising=False)
    return "my_own_task_module"


def test_built_in_tasks_load() -> None:
    assert isinstance(get_handler("file_quest", TaskConfig()), FileQuest)
    assert "reasoning_gym" in BUILT_IN


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"task\.name=file_qest is not a known task: did you mean file_quest"):
        get_handler("file_qest", TaskConfig())
    with pytest.raises(ConfigError, match=r"Known: file_quest, file_trail, reasoning_gym, .*; your own: my_package"):
        get_handler("zzz", TaskConfig())


def test_a_task_by_import_path(own_module: str) -> None:
    task = TaskConfig(name=f"{own_module}:MyHandler")
    assert get_handler(task.name, task).task is task  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:X", "module no_such_module_here does not import"),
        ("my_broken_task_module:X", "no_such_package_here"),
        ("my_own_task_module:Nope", "has no class 'Nope'; it has: Half, MyHandler, NoTask"),
        ("my_own_task_module:Half", "lacks check_row, init, run, eval"),
        ("my_own_task_module:NoTask", "could not be made from the task's configuration"),
    ],
)
def test_import_paths_that_do_not_fit_are_explained(own_module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_handler(name, TaskConfig(name=name))


def test_options_that_the_task_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.options\.kind is not an option of file_quest: did you mean kinds"):
        get_handler("file_quest", TaskConfig("file_quest", options={"kind": ["first"]}))
    with pytest.raises(ConfigError, match="'nope'; allowed: first, lines, last, words"):
        get_handler("file_quest", TaskConfig(options={"kinds": ["nope"]}))
