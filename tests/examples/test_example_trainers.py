"""The trainers of examples/ take real steps with a real rollout service."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path

import pytest
from examples_service import EXAMPLES, run_example

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.rollout import RolloutResult
from prorl_hpc.service.sync_client import SyncRolloutClient

pytestmark = [pytest.mark.slow, pytest.mark.train, pytest.mark.timeout(600)]
TRL_PYTHON = EXAMPLES.parent / ".setup" / "trl" / "bin" / "python"
LOST = 5
"""trl_watched.py says of this rollout of each step that it failed."""


def results_by_step(run: RunDirectory, prefix: str) -> list[list[RolloutResult]]:
    """The rollouts whose ids begin with ``prefix``, by step, each step's by their number."""
    with SyncRolloutClient.for_run(run.path) as client:
        results = [numbered.result for numbered in client.stream(follow=False)]
    steps: dict[int, list[RolloutResult]] = {}
    for result in results:
        if result.rollout_id.startswith(prefix):
            steps.setdefault(int(re.split(r"[-.]", result.rollout_id)[2]), []).append(result)
    return [sorted(steps[step], key=lambda result: result.sample) for step in sorted(steps)]


def served_version(run: RunDirectory, expected: int) -> int:
    """What the server says that it serves, as soon as its next heartbeat came."""
    deadline = time.monotonic() + 20
    with SyncRolloutClient.for_run(run.path) as client:
        while (served := client.status().servers[0].weight_version) != expected and time.monotonic() < deadline:
            time.sleep(0.2)
    return served


def versions(rollouts: list[RolloutResult]) -> set[int | None]:
    return {segment.weight_version for r in rollouts for segment in r.trajectory.segments if segment.trained}


def mean_reward(rollouts: list[RolloutResult]) -> float:
    return statistics.fmean(r.reward for r in rollouts if r.reward is not None)


def test_the_plain_trainer_steps_on_rollouts_of_its_newest_weights(service: RunDirectory) -> None:
    said = run_example(sys.executable, EXAMPLES / "plain_torch.py", str(service.path), "3")
    steps = re.findall(r"step (\d): reward ([\d.]+), (\d+) tokens, weights (\d+)", said)
    assert [int(step) for step, *_ in steps] == [1, 2, 3], said
    weights = [int(version) for *_, version in steps]
    assert weights == list(range(weights[0], weights[0] + 3))
    assert served_version(service, weights[-1]) == weights[-1]
    for (_, reward, tokens, version), rollouts in zip(steps, results_by_step(service, "plain-"), strict=True):
        assert versions(rollouts) == {int(version) - 1}
        assert float(reward) == pytest.approx(mean_reward(rollouts), abs=1e-3)
        assert 0 < float(reward) < 1, "groups whose rewards differ were asked for"
        assert 0 < int(tokens) <= sum(r.trajectory.num_trained_tokens for r in rollouts)


def test_trl_trains_on_the_tokens_that_the_policy_wrote_and_on_no_others(service: RunDirectory, tmp_path: Path) -> None:
    if not TRL_PYTHON.exists():
        pytest.skip(f"{TRL_PYTHON.parents[1]} is not there: scripts/setup.sh test makes it, with TRL")
    noted = tmp_path / "noted.jsonl"
    watched = Path(__file__).with_name("trl_watched.py")
    said = run_example(
        TRL_PYTHON, watched, str(EXAMPLES / "trl_grpo.py"), str(service.path), "2", str(noted), str(LOST)
    )
    steps = [json.loads(line) for line in noted.read_text().splitlines()]
    results = results_by_step(service, "trl-")
    assert len(steps) == len(results) == 2
    [newest] = re.findall(r"2 steps, weights (\d+)", said)
    assert served_version(service, int(newest)) == int(newest)
    for step, (seen, rollouts) in enumerate(zip(steps, results, strict=True)):
        assert versions(rollouts) == {int(newest) - 2 + step}
        assert len(seen) == len(rollouts) == 32
        for sample, rollout in zip(seen, rollouts, strict=True):
            assert_sample(sample, rollout)
        for first in range(0, 32, 8):
            assert_advantages(seen[first : first + 8], rollouts[first : first + 8])
        assert any(sample["advantage"] != 0 for sample in seen)
        assert any(0 in sample["loss_mask"] for sample in seen), "an environment's words are among the completions"


def assert_sample(sample: dict, rollout: RolloutResult) -> None:
    if rollout.sample == LOST:
        assert (sample["loss_mask"], sample["advantage"]) == ([0], 0.0)
        return
    prompt, trajectory = sample["prompt_ids"], rollout.trajectory
    assert prompt + sample["completion_ids"] == trajectory.token_ids
    assert [0] * len(prompt) + sample["loss_mask"] == [int(wrote) for wrote in trajectory.loss_mask]
    assert [0.0] * len(prompt) + sample["logprobs"] == pytest.approx(trajectory.logprobs, abs=1e-6)


def assert_advantages(samples: list[dict], rollouts: list[RolloutResult]) -> None:
    """The task's rewards, less the mean of their group, in units of its deviation; a failed rollout is no part of it."""
    rewards = {r.sample: r.reward for r in rollouts if r.reward is not None and r.sample != LOST}
    mean, deviation = statistics.fmean(rewards.values()), statistics.stdev(rewards.values())
    for sample, rollout in zip(samples, rollouts, strict=True):
        if rollout.sample in rewards:
            expected = (rewards[rollout.sample] - mean) / (deviation + 1e-4)
            assert sample["advantage"] == pytest.approx(expected, abs=1e-4)
