"""Environments of the real package verifiers, both of its forms, played through a real gateway with a scripted model."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.agents.conversation import TokenConversation
from prorl_hpc.config.schema import DataConfig, TaskConfig
from prorl_hpc.config.store import compose
from prorl_hpc.gateway.server import Gateway
from prorl_hpc.messages.errors import ConfigError, InferenceError
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.messages.trajectory import Finish, Trajectory
from prorl_hpc.sandbox.fake import FakeSandbox, cat
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.tasks.dataset import load_rows
from prorl_hpc.tasks.protocol import Evaluation, RolloutContext, problems_of
from prorl_hpc.tasks.registry import get_handler
from prorl_hpc.tasks.testing import ScriptedLLM, write_chat_model
from prorl_hpc.tasks.verifiers_env import VerifiersEnv
from prorl_hpc.worker.gateway_runs import GatewayRuns
from prorl_hpc.worker.policies import Policy

SETUP = Path(__file__).parents[2] / ".setup"
V1, CLASSIC = (SETUP / name / "bin" / "python" for name in ("environments", "environments-classic"))
TASK = compose(["task=verifiers", "task.options.env=v1-sum"]).task
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' + (tools | tojson) + '</tools><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m['role'] == 'tool' else m['role']) + '\n' }}"
    "{% if m['role'] == 'tool' %}{{ '<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{% if m['tool_calls'] %}{% for call in m['tool_calls'] %}"
    "{{ '<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Turns = Sequence[Any] | Callable[[str], Any]


def _python(path: Path) -> str:
    if not path.exists():
        pytest.skip(f"{path.parents[1]} is not there: scripts/setup.sh test makes it, with the package verifiers")
    return str(path)


@pytest.fixture(scope="session")
def classic() -> TaskConfig:
    return _task("classic-sum", _python(CLASSIC))


@pytest.fixture(scope="session")
def v1() -> TaskConfig:
    return _task("v1-sum", _python(V1))


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("environments")))


def _task(env: str, python: str, max_turns: int = 8, **kwargs: Any) -> TaskConfig:
    options = {"env": env, "python": python, "kwargs": kwargs, "start_timeout_s": 300.0}
    return dataclasses.replace(
        TASK, options=options, max_turns=max_turns, train=DataConfig(size=5), heldout=DataConfig(size=3)
    )


async def _play(
    task: TaskConfig, tmp_path: Path, turns: Turns, row: dict[str, Any], max_turn_tokens: int = 512
) -> tuple[Evaluation, Trajectory]:
    chat = ChatFormat.open(write_chat_model(tmp_path / "model", TEMPLATE), tool_format="hermes")
    policy = Policy(chat, 8192, max_turn_tokens)
    llm = ScriptedLLM(chat, turns)
    handler = VerifiersEnv(task)
    spec = RolloutSpec("rollout-0", "verifiers", row)
    context = RolloutContext(spec, FakeSandbox(SandboxSpec("s0"), cat))
    context.conversation = TokenConversation(
        chat, llm, spec.sampling, max_context_tokens=8192, max_turn_tokens=max_turn_tokens
    )
    context.converse = lambda: policy.converse(spec, llm, 1)
    with tempfile.TemporaryDirectory(prefix="prorl-gw-") as directory:
        gateway = Gateway(Path(directory) / "llm.sock")
        await gateway.start()
        try:
            await handler.init(context)
            await GatewayRuns(task.max_turns, gateway.socket, gateway.open_session).run(handler, context, policy)
            trajectory = context.trajectory
            assert trajectory is not None
            return await handler.eval(context), trajectory
        finally:
            await gateway.close()


def test_rows_come_from_the_environments_datasets(classic: TaskConfig) -> None:
    train, heldout = load_rows(classic, "train"), load_rows(classic, "heldout")
    assert (len(train), len(heldout)) == (5, 3)
    assert load_rows(classic, "train") == train
    assert [m["role"] for m in train[0]["input"]["prompt"]] == ["system", "user"]


def test_a_taskset_is_split_by_content(v1: TaskConfig) -> None:
    train, heldout = load_rows(v1, "train"), load_rows(v1, "heldout")
    assert not {r["input"]["prompt"] for r in train} & {r["input"]["prompt"] for r in heldout}
    wanted = dataclasses.replace(v1, train=DataConfig(size=500))
    with pytest.raises(ConfigError, match=r"task\.train\.size=500: v1-sum has only \d+ examples"):
        load_rows(wanted, "train")


@pytest.mark.parametrize(("answer", "reward"), [("it is 5", 1.0), ("it is 6", 0.0)])
async def test_a_single_turn_and_its_rubric(classic: TaskConfig, tmp_path: Path, answer: str, reward: float) -> None:
    row = {"id": "a", "input": {"prompt": [{"role": "user", "content": "4+1?"}], "answer": "5", "example_id": 0}}
    evaluation, trajectory = await _play(classic, tmp_path, [answer], row)
    assert evaluation.reward == reward
    assert evaluation.metrics["correct"] == reward
    assert evaluation.metrics["model_calls"] == 1
    assert [(m.role, m.content) for m in trajectory.messages] == [("user", "4+1?"), ("assistant", answer)]
    assert trajectory.finish is Finish.ENVIRONMENT
    assert trajectory.num_trained_tokens > 0


async def test_tool_calls_over_several_turns_are_one_trajectory(classic: TaskConfig, tmp_path: Path) -> None:
    task = _task("classic-sum", classic.options["python"], tools=True)
    row = {"id": "a", "input": {"prompt": [{"role": "user", "content": "4+1?"}], "answer": "5", "example_id": 0}}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 1}}\n</tool_call>'
    evaluation, trajectory = await _play(task, tmp_path, [call, "5"], row)
    assert evaluation.reward == 1.0
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].content == "5"
    assert not trajectory.branches


@pytest.mark.parametrize(("answer", "reward"), [("5", 1.0), ("6", 0.0)])
async def test_a_taskset_of_v1(v1: TaskConfig, tmp_path: Path, answer: str, reward: float) -> None:
    row = {"id": "a", "input": {"idx": 0, "prompt": "4+1?", "answer": "5"}}
    evaluation, trajectory = await _play(v1, tmp_path, [answer], row)
    assert evaluation.reward == reward
    assert [(m.role, m.content) for m in trajectory.messages if m.role != "system"] == [
        ("user", "4+1?"),
        ("assistant", answer),
    ]
    assert trajectory.finish is Finish.ENVIRONMENT


async def test_calls_used_up_are_scored_and_say_so(classic: TaskConfig, tmp_path: Path) -> None:
    task = _task("classic-sum", classic.options["python"], max_turns=2, tools=True)
    row = {"id": "a", "input": {"prompt": [{"role": "user", "content": "4+1?"}], "answer": "5", "example_id": 0}}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 2}}\n</tool_call>'
    evaluation, trajectory = await _play(task, tmp_path, lambda _: call, row)
    assert evaluation.reward == 0.0
    assert trajectory.finish is Finish.TURNS


async def test_an_empty_answer_is_the_policys_fault(classic: TaskConfig, tmp_path: Path) -> None:
    row = {"id": "a", "input": {"prompt": [{"role": "user", "content": "4+1?"}], "answer": "5", "example_id": 0}}
    evaluation, trajectory = await _play(classic, tmp_path, [""], row)
    assert evaluation.reward == 0.0
    assert trajectory.finish is Finish.MALFORMED


async def test_a_broken_llm_server_is_no_fault_of_the_environment(classic: TaskConfig, tmp_path: Path) -> None:
    row = {"id": "a", "input": {"prompt": [{"role": "user", "content": "4+1?"}], "answer": "5", "example_id": 0}}
    with pytest.raises(InferenceError, match="gone away"):
        await _play(classic, tmp_path, [InferenceError("gone away")], row)


async def test_an_environment_that_breaks_is_told(classic: TaskConfig, tmp_path: Path) -> None:
    row = {"id": "a", "input": {"prompt": [{"role": "user", "content": "4+1?"}], "example_id": 0, "info": "{"}}
    with pytest.raises(RuntimeError, match="the environment classic-sum, row a: "):
        await _play(classic, tmp_path, ["5"], row)


def test_an_environment_that_cannot_be_loaded_is_found_before_launch(v1: TaskConfig) -> None:
    python = v1.options["python"]
    for env, message in (
        ("gone", "there is no module gone in .*environments/bin/python"),
        ("v1-sum", r"extra|size2|[Vv]alidation"),
    ):
        task = _task(env, python, taskset={"size2": 1})
        (problem,) = problems_of(get_handler("verifiers", task))
        assert re.search(message, problem), problem


def test_old_environments_are_told_which_version_they_need(v1: TaskConfig, tmp_path: Path) -> None:
    (tmp_path / "old_env.py").write_text("def load_environment(): ...\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        (problem,) = problems_of(get_handler("verifiers", _task("old-env", v1.options["python"])))
    assert "install verifiers<0.4" in problem


def test_wrong_options_are_named() -> None:
    for options, message in (
        ({}, r"task\.options\.env=None: expected an environment"),
        ({"env": "a", "pyton": "x"}, r"task\.options\.pyton is not an option of verifiers: did you mean python"),
        ({"env": "a", "kwargs": "x"}, r"task\.options\.kwargs='x': expected names and values"),
    ):
        with pytest.raises(ConfigError, match=message):
            get_handler("verifiers", dataclasses.replace(TASK, options=options))


def test_without_the_package_it_is_told(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, options={"env": "some-env", "start_timeout_s": 60.0})
    (problem,) = problems_of(get_handler("verifiers", task))
    assert "the package verifiers is not in" in problem
    assert "task.options.python" in problem
