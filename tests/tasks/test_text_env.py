"""Environments with reset and step as tasks: episodes in processes of their own, however they end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.config.schema import DataConfig, TaskConfig
from prorl_hpc.config.store import compose
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.sandbox.fake import FakeSandbox, cat
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.protocol import Evaluation, problems_of
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.tasks.testing import ScriptedLLM, play, write_chat_model
from prorl_hpc.tasks.text_env import TextEnv, find_action

TASK = dataclasses.replace(compose(["task=text_env"]).task, train=DataConfig(size=12), heldout=DataConfig(size=6))
ROW = {"id": "a", "seed": 7, "options": {}}


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return ChatFormat.open(write_chat_model(tmp_path / "model"))


@pytest.fixture(autouse=True)
def games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def _task(max_turns: int = 6, call_timeout_s: float = 10.0, **options: Any) -> TaskConfig:
    return dataclasses.replace(TASK, max_turns=max_turns, call_timeout_s=call_timeout_s, options=options)


async def _play(
    task: TaskConfig, chat: ChatFormat, turns: Sequence[str], row: dict[str, Any] = ROW
) -> tuple[Evaluation, TokenConversation]:
    handler = get_handler("text_env", task)
    return await play(handler, row, FakeSandbox(SandboxSpec("s0"), cat), chat, ScriptedLLM(chat, turns))


async def test_observations_are_user_messages_and_the_episodes_reward_counts(chat: ChatFormat) -> None:
    task = _task(env="text_env_games:Countdown", kwargs={"steps": 2})
    evaluation, conversation = await _play(task, chat, ["<think>hm</think> up", "down"])
    trajectory = conversation.trajectory
    assert [(m.role, m.content) for m in trajectory.messages] == [
        ("user", "2 left"),
        ("assistant", "<think>hm</think> up"),
        ("user", "you did [up]"),
        ("assistant", "down"),
    ]
    assert trajectory.finish is Finish.ENVIRONMENT
    assert evaluation.reward == 2.0
    assert evaluation.metrics == {
        "info_left": 0.0,
        "info_ok": 1.0,
        "turns": 2,
        "steps": 2,
        "without_action": 0,
        "terminated": 1.0,
        "truncated_by_environment": 0.0,
    }


async def test_the_last_reward_alone_and_a_rows_own_options(chat: ChatFormat) -> None:
    task = _task(env="text_env_games:Countdown", kwargs={"steps": 2}, reward="last", reset={"last_reward": 3.0})
    assert (await _play(task, chat, ["a", "b"]))[0].reward == 3.0
    row = {**ROW, "options": {"last_reward": 0.25}}
    assert (await _play(task, chat, ["a", "b"], row))[0].reward == 0.25


async def test_the_example_game_is_won_and_repeats_by_seed(chat: ChatFormat) -> None:
    task = _task(env="prorl_hpc.tasks.number_hunt:NumberHunt", reset={"secret": 20})
    evaluation, conversation = await _play(task, chat, ["I say 50", "none", "20"])
    messages = conversation.trajectory.messages
    assert messages[0].role == "system"
    assert [m.content for m in messages if m.role == "user"][1:] == ["lower", "that is no number"]
    assert (evaluation.reward, evaluation.metrics["info_best_distance"]) == (1.0, 0.0)
    unseeded = _task(env="prorl_hpc.tasks.number_hunt:NumberHunt", kwargs={"guesses": 1})
    first, again = [(await _play(unseeded, chat, ["50"]))[0] for _ in range(2)]
    assert first == again
    assert 0.0 < first.reward < 1.0


@pytest.mark.parametrize(
    ("turns", "reward", "ended"),
    [(["go", "stop"], 4.0, "terminated"), (["late"], 2.0, "")],
)
async def test_environments_of_the_old_form(chat: ChatFormat, turns: list[str], reward: float, ended: str) -> None:
    task = _task(max_turns=len(turns), env="text_env_games:Old")
    evaluation, conversation = await _play(task, chat, turns)
    first = conversation.trajectory.messages[0].content
    assert first.startswith("seeded with 7, drew ")
    assert (await _play(task, chat, turns))[1].trajectory.messages[0].content == first
    assert evaluation.reward == reward
    assert evaluation.metrics["terminated"] == (1.0 if ended else 0.0)


async def test_turns_without_an_action_are_told_or_end(chat: ChatFormat) -> None:
    options = {"env": "text_env_games:Countdown", "action": r"<do>(.*?)</do>"}
    turns = ["nothing", "<do>a</do> or <do>b</do>", "x"]
    evaluation, conversation = await _play(_task(max_turns=3, **options), chat, turns)
    told = [m.content for m in conversation.trajectory.messages if m.role == "user"]
    assert told == ["3 left", "No action was found. It must match <do>(.*?)</do>", "you did [b]"]
    assert evaluation.metrics["without_action"] == 2
    assert conversation.finish is Finish.TURNS
    _, ended = await _play(_task(no_action="end", **options), chat, turns)
    assert ended.finish is Finish.MALFORMED


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"KeyError: 'no such door' \(.*text_env_games\.py:\d+\)"),
        ("exit", r"ended with exit code 3 during step; it printed last: .*out of luck"),
        ("hang", r"step did not answer within 0\.5 s"),
        ("numbers", r"observation of type int: text is needed\. Wrap"),
        ("three", r"step returned a tuple of 3: expected"),
        ("reward", r"the reward 'much', which is not a number"),
        ("nan", r"the reward nan: expected a finite number"),
    ],
)
async def test_what_breaks_is_told(chat: ChatFormat, how: str, message: str) -> None:
    task = _task(call_timeout_s=0.5 if how == "hang" else 10.0, env="text_env_games:Broken", kwargs={"how": how})
    with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)) as told:
        await _play(task, chat, ["go"])
    assert str(told.value).startswith("the environment text_env_games:Broken, seed 7: ")


async def test_cancelling_kills_the_episode_and_its_children_alone(chat: ChatFormat) -> None:
    task = _task(call_timeout_s=600.0, env="text_env_games:Broken", kwargs={"how": "child"})
    handler = TextEnv(task)
    scripted = ScriptedLLM(chat, ["go"])
    await handler._server.ready()
    (server,) = {handler._server._host._process.pid}  # type: ignore[union-attr]
    playing = asyncio.create_task(play(handler, ROW, FakeSandbox(SandboxSpec("s0"), cat), chat, scripted))
    while len(group := _below(server)) < 2:
        await asyncio.sleep(0.02)
        assert not playing.done()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    while any(_lives(pid) for pid in group):  # noqa: ASYNC110  (another process's end)
        await asyncio.sleep(0.02)
    assert _lives(server)


def test_an_episode_ends_with_its_worker() -> None:
    code = (
        "import asyncio, os\n"
        "from prorl_hpc.tasks.side.process import SideServer\n"
        "async def main():\n"
        "    server = SideServer('text_environment', '', {'env': 'text_env_games:Broken'}, 60.0)\n"
        "    async with server.episode() as side:\n"
        "        await side.call('begin', 30.0, kwargs={'how': 'hang'}, seed=0, options={})\n"
        "        stepping = asyncio.create_task(side.call('step', 600.0, action='go'))\n"
        "        await asyncio.sleep(0.1)\n"
        "        print(side._pid, server._host._process.pid, server._socket.parent, flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    episode, server, directory = done.stdout.split()
    for _ in range(500):
        if not _lives(int(episode)) and not _lives(int(server)) and not Path(directory).exists():
            return
        subprocess.run(["sleep", "0.02"], check=True)
    pytest.fail(f"the episode {episode} or its server {server} outlived their worker: {done.stderr}")


def _lives(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie's is empty
    except OSError:
        return False


def _below(pid: int) -> set[int]:
    """Processes below ``pid``, whichever sessions they are in."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    below = {child for child, parent in parents.items() if parent == pid}
    return below.union(*map(_below, below))


def test_rows_by_seed_are_repeatable_and_share_nothing() -> None:
    train, heldout = load_rows(TASK, "train"), load_rows(TASK, "heldout")
    assert (len(train), len(heldout)) == (12, 6)
    assert load_rows(TASK, "train") == train
    assert not {r["seed"] for r in train} & {r["seed"] for r in heldout}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a"}, "field seed is missing"),
        ({"id": "a", "seed": -1}, "field seed is -1, expected 0"),
        ({"id": "a", "seed": True}, "field seed is True"),
        ({"id": "a", "seed": 1, "options": [1]}, "field options is a list"),
    ],
)
def test_rows_that_cannot_be_played_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_handler("text_env", TASK).check_row(row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"task\.options\.env=None: expected an environment, as module:Class"),
        ({"env": "a:B", "kwarg": {}}, r"task\.options\.kwarg is not an option of text_env: did you mean kwargs"),
        ({"env": "a:B", "action": "("}, r"task\.options\.action='\(' is not a regular expression"),
        ({"env": "a:B", "reward": "mean"}, r"task\.options\.reward=mean: expected sum or last"),
        ({"env": "a:B", "no_action": "x"}, r"task\.options\.no_action=x: expected tell or end"),
        ({"env": "a:B", "kwargs": [1]}, r"task\.options\.kwargs=\[1\]: expected names and values"),
        ({"env": "a:B", "reset": {"x": {1}}}, r"task\.options\.reset: .*only what JSON has"),
        ({"env": "a:B", "start_timeout_s": 0}, r"task\.options\.start_timeout_s=0: expected seconds"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_handler("text_env", _task(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "no_such_module:Game"}, "the module no_such_module does not import in .*task.options.python"),
        ({"env": "text_env_games:Gone"}, "no class or function 'Gone'; it has: Broken, Chatter"),
        ({"env": "text_env_games:NoStep"}, "has no method step"),
        ({"env": "text_env_games:Countdown", "kwargs": {"size": 1}}, "TypeError: .*unexpected keyword.*size"),
        ({"env": "text_env_games:Old", "reset": {"a": 1}}, "its reset takes no options"),
        ({"env": "text_env_games:Old", "python": "/no/python"}, r"task\.options\.python=/no/python is not a program"),
    ],
)
def test_an_environment_that_cannot_start_is_found_before_launch(options: dict[str, Any], message: str) -> None:
    (problem,) = problems_of(get_handler("text_env", _task(**options)))
    assert re.search(message, problem)


def test_an_environment_that_starts_is_no_problem() -> None:
    assert list(problems_of(get_handler("text_env", TASK))) == []


@pytest.mark.parametrize(
    ("turn", "pattern", "action"),
    [
        ("go north ", None, "go north"),
        ("<think>maybe 3</think>\n4", None, "4"),
        ("maybe 3</think>4", r"\d", "4"),
        ("1 then 2", r"\d", "2"),
        ("say (a) (b)", r"\((\w)\)", "b"),
        ("none", r"\d", None),
    ],
)
def test_where_the_action_is_in_a_turn(turn: str, pattern: str | None, action: str | None) -> None:
    assert find_action(turn, re.compile(pattern) if pattern else None) == action
