"""text_env with the real package gymnasium, and the examples of docs/environments.md."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.store import compose
from prorl_hpc.sandbox.fake import FakeSandbox, cat
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.tasks.protocol import problems_of
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".setup" / "environments" / "bin" / "python"
BLOCK = re.compile(r"```python\n# (\w+)\.py\n(.*?)```", re.DOTALL)
TASK = compose(["task=text_env", "task.max_turns=12"]).task


@pytest.fixture
def gymnasium_python() -> str:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: scripts/setup.sh test makes it, with the package gymnasium")
    return str(PYTHON)


@pytest.fixture(autouse=True)
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in BLOCK.findall((ROOT / "docs" / "environments.md").read_text()):
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "registering.py").write_text(
        "import gymnasium\nimport lake_text\n"
        "gymnasium.register('Lake-v0', entry_point=lake_text.LakeText, disable_env_checker=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


async def _play(tmp_path: Path, turns: list[str], **options: Any) -> tuple[float, dict[str, float], list[str]]:
    chat = ChatFormat.open(write_chat_model(tmp_path / "model"))
    handler = get_handler("text_env", dataclasses.replace(TASK, options=options))
    row = {"id": "a", "seed": 3, "options": {}}
    scored, conversation = await play(handler, row, FakeSandbox(SandboxSpec("s0"), cat), chat, ScriptedLLM(chat, turns))
    shown = [m.content for m in conversation.trajectory.messages if m.role == "user"]
    return scored.reward, scored.metrics, shown


async def test_the_game_of_the_docs_is_played(tmp_path: Path) -> None:
    reward, metrics, shown = await _play(tmp_path, ["odd", "odd", "odd"], env="my_games:Parity")
    assert [re.sub(r"\d+", "N", text) for text in shown[:1]] == ["Is N odd or even?"]
    asked = [int(re.search(r"\d+", text)[0]) for text in shown]  # type: ignore[index]
    assert reward == pytest.approx(sum(number % 2 for number in asked) / 3)
    assert metrics["info_left"] == 0.0


async def test_the_wrapped_lake_of_the_docs_is_crossed(tmp_path: Path, gymnasium_python: str) -> None:
    moves = ["Let us go right.", "right", "down", "down", "jump", "down", "right"]
    reward, metrics, shown = await _play(
        tmp_path, moves, env="lake_text:LakeText", python=gymnasium_python, action="left|down|right|up|jump"
    )
    assert shown[0] == "@FFF\nFHFH\nFFFH\nHFFG"
    assert shown[5].startswith("That is no move.")
    assert (reward, metrics["terminated"]) == (1.0, 1.0)


async def test_an_id_of_gymnasium_with_the_module_that_registers_it(tmp_path: Path, gymnasium_python: str) -> None:
    reward, metrics, _ = await _play(
        tmp_path, ["down", "right"], env="registering:Lake-v0", python=gymnasium_python, kwargs={"size": 4}
    )
    assert (reward, metrics["terminated"]) == (0.0, 1.0)  # into the hole


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("FrozenLake-v1", "reset gave an observation of type int: text is needed. Wrap the environment"),
        ("FrozenPond-v1", "FrozenPond-v1 is neither module:Class nor an id that Gymnasium knows"),
    ],
)
def test_what_gymnasium_has_and_is_not_text_is_found_before_launch(
    gymnasium_python: str, env: str, message: str
) -> None:
    handler = get_handler("text_env", dataclasses.replace(TASK, options={"env": env, "python": gymnasium_python}))
    (problem,) = problems_of(handler)
    assert message in problem


def test_without_gymnasium_it_is_told_what_to_install() -> None:
    (problem,) = problems_of(get_handler("text_env", dataclasses.replace(TASK, options={"env": "FrozenLake-v1"})))
    assert "pip install gymnasium" in problem
    assert "task.options.python" in problem
