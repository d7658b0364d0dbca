"""Rewards of single policies: in place of the task's own, and what becomes of those that break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from worker_bench import SERVER, Bench, trajectory_of

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import PolicyConfig, ProrlConfig
from prorl_hpc.messages.control import StageFinished, StartEval, StartInit, StartRun, WorkerHello
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import FailureKind, RolloutSpec
from prorl_hpc.worker.policies import Policy, load_policies
from prorl_hpc.worker.rewards import PolicyReward

FUNCTIONS = ("halved", "of_the_row", "broken", "a_word", "endless")


@pytest.fixture
def more_policies(chat: ChatFormat) -> dict[str, Policy]:
    return {name: Policy(chat, 512, 64, reward=PolicyReward(name, f"reward_functions:{name}")) for name in FUNCTIONS}


@pytest.fixture
async def play(bench: Bench) -> Callable[[str], object]:
    await bench.coordinator.expect(WorkerHello)

    async def through(policy: str) -> StageFinished:
        spec = RolloutSpec("r", bench.task, {"id": "r", "reward": 0.5, "worth": 3}, policy=policy)
        for order in (StartInit(spec, 9.0), StartRun("r", SERVER, 9.0), StartEval("r", 9.0)):
            await bench.coordinator.order(order)
            done = await bench.coordinator.expect(StageFinished)
        return done

    return through


@pytest.mark.parametrize(("policy", "reward"), [("halved", 0.25), ("of_the_row", 3.0)])
async def test_a_policys_reward_stands_in_place_of_the_tasks(
    play: Callable[..., object], policy: str, reward: float
) -> None:
    done = await play(policy)  # type: ignore[misc]
    assert (done.failure, done.reward, done.metrics) == (None, reward, {"length": 5.0, "task_reward": 0.5})


async def test_others_keep_the_tasks_own(play: Callable[..., object]) -> None:
    done = await play("policy")  # type: ignore[misc]
    assert (done.reward, done.metrics) == (0.5, {"length": 5.0})


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("broken", "policies.broken.reward=reward_functions:broken broke: KeyError: 'a bug'"),
        ("a_word", "policies.a_word.reward=reward_functions:a_word returned 'good': expected a finite number"),
        ("endless", "policies.endless.reward=reward_functions:endless returned inf: expected a finite number"),
    ],
)
async def test_a_reward_that_breaks_is_the_tasks_fault(play: Callable[..., object], policy: str, words: str) -> None:
    done = await play(policy)  # type: ignore[misc]
    assert done.failure is not None
    assert (done.failure.kind, done.failure.message, done.reward) == (FailureKind.TASK, words, None)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:f", "the module no_such_module does not import"),
        ("reward_functions:halve", "reward_functions has no function 'halve'; it has: a_word, broken, endless, halved"),
        ("reward_functions:of_one", "cannot be called with \\(evaluation, context\\): too many positional arguments"),
        ("reward_functions", "expected module:function"),
    ],
)
def test_what_cannot_be_imported_is_told_before_launch(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^policies.b.reward={path}.*{words}"):
        PolicyReward("b", path)


def test_a_worker_loads_every_policy(process_config: ProrlConfig) -> None:
    other = PolicyConfig(reward="reward_functions:halved")
    other.model.path, other.model.max_context_tokens = process_config.model.path, 99
    process_config.policies = {"b": other}
    policies = load_policies(process_config)
    assert {name: policy.max_context_tokens for name, policy in policies.items()} == {"policy": 1024, "b": 99}
    assert policies["policy"].reward is None and policies["b"].reward is not None
    other.model.path = ""
    with pytest.raises(ConfigError, match=r"^policies\.b\.model\.path is empty"):
        load_policies(process_config)


async def test_run_reports_how_the_conversation_ended_and_its_tokens(bench: Bench) -> None:
    await bench.coordinator.expect(WorkerHello)
    init = await bench.init("r")
    run = await bench.run("r")
    trajectory = trajectory_of(run)
    assert trajectory is not None and run.generated_tokens == trajectory.num_trained_tokens > 0
    assert run.finish is trajectory.finish
    assert (init.generated_tokens, (await bench.eval("r")).generated_tokens) == (0, 0)
