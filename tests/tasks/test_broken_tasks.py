"""A fault in a task's own code is told with its place before anything starts, never a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorl_hpc.config.schema import DataConfig, TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.tasks.dataset import load_rows, read_jsonl
from prorl_hpc.tasks.registry import get_handler

MODULE = """
class Base:
    def __init__(self, task): pass
    def generate_rows(self, split, size, seed): return [{"id": f"{split}-{i}"} for i in range(size)]
    def check_row(self, row): pass
    async def init(self, context): pass
    async def run(self, context): pass
    async def eval(self, context): pass

class Ctor(Base):
    def __init__(self, task): raise RuntimeError("ctor boom")

class Gen(Base):
    def generate_rows(self, split, size, seed): raise KeyError("gen boom")

class NoRows(Base):
    def generate_rows(self, split, size, seed): return None

class NotRows(Base):
    def generate_rows(self, split, size, seed): return [1, 2]

class Check(Base):
    def check_row(self, row): row["nope"]
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_tasks_here.py").write_text(MODULE)
    (tmp_path / "broken_syntax_here.py").write_text("x = (\n")
    (tmp_path / "broken_exit_here.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken_tasks_here:Ctor", "RuntimeError: ctor boom"),
        ("broken_tasks_here:Gen", r"cannot generate its rows: KeyError: 'gen boom' \(.*broken_tasks_here\.py:\d+\)"),
        ("broken_tasks_here:NoRows", "cannot generate its rows: TypeError"),
        ("broken_tasks_here:NotRows", "a int, expected a dict"),
        ("broken_tasks_here:Check", r"row 1 .*: the task cannot check it: KeyError: 'nope'"),
        ("broken_syntax_here:X", "breaks while it is imported: SyntaxError"),
        ("broken_exit_here:X", "breaks while it is imported: SystemExit"),
        (":X", "expected module:Class"),
        ("broken_tasks_here:", "expected module:Class"),
    ],
)
def test_a_fault_of_the_task_is_told_with_its_place(modules: None, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_rows(TaskConfig(name=name, options={}, train=DataConfig(size=2)), "train")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_jsonl(tmp_path / "pipe", get_handler("file_trail", TaskConfig()))


def test_deep_nesting_is_a_row_that_does_not_parse(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"deep\.jsonl:1: nested too deeply"):
        read_jsonl(tmp_path / "deep.jsonl", get_handler("file_trail", TaskConfig()))


def test_an_option_of_the_wrong_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kinds"):
        get_handler("file_trail", TaskConfig(options={"kinds": ["abc"]}))
