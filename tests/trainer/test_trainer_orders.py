"""What the trainer orders is of the policy that it trains, whatever others the run has."""

from __future__ import annotations

from prorl_hpc.config.schema import TRAINED, PolicyConfig, ProrlConfig
from prorl_hpc.trainer.orders import evaluation_order, training_order


def test_orders_are_of_the_trained_policy_alone() -> None:
    config = ProrlConfig()
    config.policies = {"base": PolicyConfig()}
    config.rollout.policy_weights = {"base": 1.0}
    rows = [{"id": "r"}]
    assert {training_order(config, 1, rows).policy, evaluation_order(config, 1, rows).policy} == {TRAINED}
