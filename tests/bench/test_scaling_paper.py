"""Ours beside the published figures."""

from __future__ import annotations

from scaling_points import Shape, done, failed, spec

from prorl_hpc.bench.scaling_paper import EFFICIENCY, ablations_table, nodes_table


def test_their_efficiency_follows_from_their_chart() -> None:
    assert {nodes: round(share, 2) for nodes, share in EFFICIENCY.items()} == {1: 1.0, 2: 0.94, 4: 0.78, 8: 0.63}


def test_nodes_beside_theirs() -> None:
    table = nodes_table([done(spec(1)), failed(spec(4)), done(spec(16), Shape(per_node=0.08))]).splitlines()
    assert table[2] == "| 1 | 0.25 instances/s | 1.00 | 0.1 rollouts/s | 1.000 |"
    assert table[3] == "| 4 | 0.78 instances/s | 0.78 | – | **failed** |"
    assert table[4] == "| 16 | – | – | 1.28 rollouts/s | 0.800 |"
    assert nodes_table([]) == ""


def test_each_side_of_an_ablation_against_ours_with_what_differs() -> None:
    results = [
        done(spec(1, "pools", "stages"), Shape(per_node=0.9)),
        done(spec(1, "pools", "coupled"), Shape(per_node=0.3)),
        failed(spec(2, "pools", "stages")),
        done(spec(1, "cleanup", "on"), Shape(batch_s=(10.0,))),
    ]
    table = ablations_table(results)
    assert (
        "| pools | rollouts/s | 1 | three stages: 0.9 rollouts/s | one coupled pool: 0.3 rollouts/s | 3.00 × |" in table
    )
    assert "three stages: **failed** | one coupled pool: **not measured** | – |" in table
    assert "0.37 to 0.30 instances/s" in table and "14B on 8 GPUs in the paper" in table
    assert ablations_table([done(spec(1))]) == ""
