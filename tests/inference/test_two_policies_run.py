"""A whole run of real processes with two policies side by side: both served, drawn by weights, rewarded and counted apart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from small_run import small_config, small_run

from prorl_hpc.cli.run_detail import detail_json, detail_view
from prorl_hpc.config.schema import ModelConfig, PolicyConfig, ProrlConfig
from prorl_hpc.core.policy_choice import ANY, PolicyChoice
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.observe.report import write_report
from prorl_hpc.observe.rollout_store import read_rollouts
from prorl_hpc.slurm.failure import read_failure
from prorl_hpc.slurm.run_states import run_state
from prorl_hpc.tasks.testing import write_chat_model

pytestmark = pytest.mark.timeout(120)

REWARD = """
def ten_more(evaluation, context):
    return evaluation.reward + 10.0
"""


def config_of_two(directory: Path, runtime_root: Path, monkeypatch: pytest.MonkeyPatch) -> ProrlConfig:
    """``policy`` on two servers, ``base`` on one, with a reward of its own, drawn three to one."""
    config = small_config(directory, runtime_root)
    model = ModelConfig(name="older", path=str(write_chat_model(directory / "older")), max_context_tokens=512)
    config.policies = {"base": PolicyConfig(model=model, reward="ab_reward:ten_more")}
    config.engine.servers_per_node = 2
    config.rollout.policy_weights = {"policy": 3.0, "base": 1.0}
    (directory / "code").mkdir()
    (directory / "code" / "ab_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(directory / "code"))
    return config


async def test_two_policies_in_one_run(tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_two(tmp_path, socket_dir, monkeypatch)
    choice = PolicyChoice(["policy", "base"], config.rollout.policy_weights, config.run.seed)
    async with small_run(config) as run:
        await run.ready("coordinator", "worker-0", "inference-0", "inference-1", "inference-base-0")
        async with run.client() as client:
            answers = await client.update_weights(WeightUpdate(1, ["scripted"]))
            assert sorted(a.server_id for a in answers) == ["inference-0", "inference-1"], "base is frozen"
            assert {(s.server_id, s.policy, s.model, s.weight_version) for s in await client.servers()} == {
                ("inference-0", "policy", config.model.name, 1),
                ("inference-1", "policy", config.model.name, 1),
                ("inference-base-0", "base", "older", 0),
            }
            await client.submit_batch(replace(run.order("b", groups=24), policy=ANY))
            rollouts = [r for group in (await client.wait_batch("b")).groups for r in group.rollouts]
            await client.submit_batch(run.order("trained", groups=4))
            trained = [r for group in (await client.wait_batch("trained")).groups for r in group.rollouts]
            policies = {status.policy: status for status in await client.policies()}
        check_rollouts(rollouts, choice)
        assert {r.policy for r in trained} == {"policy"} and {r.server for r in trained} <= {
            "inference-0",
            "inference-1",
        }
        counts = Counter(r.policy for r in [*rollouts, *trained])
        assert {name: status.rollouts for name, status in policies.items()} == {
            name: {"done": counts[name]} for name in ("policy", "base")
        }
        assert policies["base"].reward is not None and policies["policy"].reward is not None
        assert policies["base"].reward >= 10 > policies["policy"].reward
        assert all(status.generated_tokens > 0 and sum(status.finishes.values()) for status in policies.values())
        table = read_rollouts(run.run, columns=["policy"])
        state = run_state(run.run)
        told = detail_json(run.run, state)["policies"]
        assert {entry["policy"] for entry in json.loads(json.dumps(told))} == {"policy", "base"}
        assert detail_view(run.run, state)
    table = read_rollouts(run.run, columns=["policy"])
    assert Counter(table["policy"].to_pylist()) == counts
    report = write_report(run.run).read_text()
    assert "## Policies side by side" in report and f"| base | {counts['base']} | 0 |" in report
    assert read_failure(run.run) is None


def check_rollouts(rollouts: list[RolloutResult], choice: PolicyChoice) -> None:
    assert {r.status for r in rollouts} == {Status.DONE}
    assert {r.group_id: r.policy for r in rollouts} == {r.group_id: choice.resolve(ANY, r.group_id) for r in rollouts}
    counts = Counter(r.policy for r in rollouts)
    assert counts["policy"] > counts["base"] > 0
    for r in rollouts:
        on_base = r.policy == "base"
        assert r.server.startswith("inference-base-") is on_base
        versions = {segment.weight_version for segment in r.trajectory.segments if segment.trained}
        assert versions == {0 if on_base else 1}
        assert ("task_reward" in r.metrics) is on_base
        assert r.reward == (r.metrics["task_reward"] + 10 if on_base else r.reward)
        assert r.generated_tokens == r.trajectory.num_trained_tokens and r.finish is r.trajectory.finish
