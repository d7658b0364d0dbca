"""The simulated continuation of a series: fitted from recorded runs, held against the measured rates."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scaling_points import Shape, done, spec

from prorl_hpc.bench.scaling_recorded import Recorded
from prorl_hpc.bench.scaling_records import RECORD_FILE, LoadRecord, PointResult
from prorl_hpc.bench.scaling_simulated import Coordinator
from prorl_hpc.bench.scaling_simulation import fit_coordinator, simulate_series
from prorl_hpc.bench.simulation import simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_draws import Draws
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.observe.rollout_store import SCHEMA

SLOTS, RUN_S = 4, 40.0
PER_NODE = SLOTS / RUN_S


def recorded(tmp_path: Path, nodes: int, slower: float = 1.0, shape: Shape | None = None) -> PointResult:
    """A point whose rate is the closed form of full RUN slots, and its run with stage times that give this rate."""
    run_s = slower * np.random.default_rng(nodes).uniform(0.8 * RUN_S, 1.2 * RUN_S, 60 * nodes)
    return point_with(tmp_path, nodes, [(f"row{n % 60}", float(seconds)) for n, seconds in enumerate(run_s)], shape)


def point_with(
    tmp_path: Path, nodes: int, rollouts: list[tuple[str, float]], shape: Shape | None = None, timed_out: int = 0
) -> PointResult:
    """A point whose rollouts took these rows and seconds of RUN, in this order; on disk they lie in another. The first
    ``timed_out`` ran out of time."""
    run_dir = tmp_path / f"run-{nodes}"
    (run_dir / "rollouts").mkdir(parents=True)
    empty = {name: [] for name in SCHEMA.names if pa.types.is_list(SCHEMA.field(name).type)}
    rows = [
        {**empty, "rollout_id": f"load-{n}", "row_id": row, "metrics": [],
         "status": "done" if n >= timed_out else "timed_out",
         "timings": [{"stage": stage, "queued_s": 0.0, "busy_s": busy_s}
                     for stage, busy_s in (("init", 1.0), ("run", seconds), ("eval", 2.0))]}
        for n, (row, seconds) in enumerate(rollouts)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows[::-1], schema=SCHEMA), run_dir / "rollouts" / "single-0.parquet")
    sizes = {"init": nodes, "ready": 2 * nodes, "run": SLOTS * nodes, "eval": nodes}
    record = LoadRecord(0.0, 1.0, {}, [], 0.0, [], sizes)
    (run_dir / RECORD_FILE).write_bytes(msgspec.json.encode(record))
    shape = shape or Shape()
    shape.per_node, shape.run_dir = PER_NODE, str(run_dir)
    return done(spec(nodes, rollouts=len(rollouts) // nodes), shape)


def test_measured_points_are_foretold_and_the_continuation_holds(tmp_path: Path) -> None:
    found = simulate_series([recorded(tmp_path, 1), recorded(tmp_path, 4)], [16])
    assert found.valid and not found.why
    assert [check.nodes for check in found.checks] == [1, 4]
    assert all(abs(check.error) < 0.1 for check in found.checks)
    assert found.points[0].efficiency == pytest.approx(1.0, abs=0.05)
    assert found.points[0].per_s == pytest.approx(16 * PER_NODE, rel=0.1)
    assert found.points[0].rollouts == 16 * 64 * SLOTS  # more than were measured: the ends must not weigh
    assert "the first part to saturate would be the coordinator" in found.conclusion


def test_a_coordinator_that_saturates_is_named_with_its_size(tmp_path: Path) -> None:
    slow = [recorded(tmp_path, nodes, shape=Shape(coordinator_s=0.1)) for nodes in (1, 2)]
    found = simulate_series(slow, [16, 150])
    assert found.points[0].efficiency > 0.95
    assert found.points[1].per_s == pytest.approx(10, rel=0.1)
    assert "the coordinator saturates" in found.conclusion
    assert "nodes of this workload beside their heartbeats, 10 rollouts/s" in found.conclusion
    assert "at 300 nodes, " in simulate_series(slow, [150, 300]).conclusion


def test_a_machine_that_slows_down_with_more_nodes_makes_it_invalid(tmp_path: Path) -> None:
    found = simulate_series([recorded(tmp_path, 1), recorded(tmp_path, 2, slower=1.5)], [8])
    assert not found.valid
    assert "within 10 %" in found.why and "at 1 node," in found.why


def test_one_point_proves_nothing(tmp_path: Path) -> None:
    found = simulate_series([recorded(tmp_path, 2)], [4])
    assert not found.valid and "only one point" in found.why


def test_a_run_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no point of the series was measured"):
        simulate_series([], [4])
    with pytest.raises(ConfigError, match=RECORD_FILE):
        simulate_series([done(spec(1))], [4])


def test_the_coordinators_rest_is_told_from_its_work() -> None:
    # 0.02 of a CPU at rest and 5 ms a rollout; per_s is 0.8 of the steady rate.
    points = [done(spec(n), Shape(per_node=1.0, coordinator_s=0.005 + 0.02 / (0.8 * n))) for n in (1, 2, 8)]
    fitted = fit_coordinator([*points])
    assert fitted.rollout_s == pytest.approx(0.005)
    assert fitted.idle == pytest.approx(0.02)
    alone = fit_coordinator(points[:1])
    assert (alone.rollout_s, alone.idle) == (pytest.approx(0.03), 0.0)
    unknown = fit_coordinator([done(spec(1), Shape(coordinator_s=None))])
    assert unknown.rollout_s == 0 and "not measured" in unknown.how


def test_a_station_that_is_fast_enough_changes_nothing_and_one_that_is_not_is_the_limit() -> None:
    config = {"rollouts": 2000, "nodes": 10, "slots": 10, "init": "0", "run": "uniform:8:12", "eval": "0", "plot": ""}
    free = simulate(SimulationConfig(**config))
    fast = simulate(SimulationConfig(**config, coordinator_s=0.001))
    slow = simulate(SimulationConfig(**config, coordinator_s=0.2))
    assert fast.steady_per_s == pytest.approx(free.steady_per_s, rel=0.05)
    assert slow.steady_per_s == pytest.approx(5, rel=0.02)
    assert slow.limited_by == "coordinator" and slow.ideal_per_s == pytest.approx(5)
    assert slow.pool("coordinator").utilisation == pytest.approx(1, abs=0.02)
    assert slow.statuses["done"] == 2000
    assert "coordinator" not in {pool.name for pool in free.pools}


def test_no_ready_buffer() -> None:
    assert SimulationConfig(slots=8, ready_ratio=0).pools.ready == 0
    assert SimulationConfig(slots=8, ready_ratio=0, ready_slots=3).pools.ready == 3
    without = simulate(SimulationConfig(rollouts=400, nodes=2, slots=4, ready_ratio=0, plot="", init="5", run="5"))
    with_it = simulate(SimulationConfig(rollouts=400, nodes=2, slots=4, plot="", init="5", run="5", init_slots=4))
    assert without.statuses["done"] == 400
    assert without.steady_per_s < with_it.steady_per_s


def test_times_are_replayed_in_their_order_and_from_the_start_again() -> None:
    times = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    fates = Draws(SimulationConfig(), times).fates(0)
    assert [next(fates)[:3] for _ in range(4)] == [(1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 2, 3)]


def test_a_row_is_foretold_by_what_it_took_elsewhere(tmp_path: Path) -> None:
    """Rows differ by a factor of ten, and are ordered otherwise in the two points: only the row tells the time."""
    quick, slow = 1.0, 10.0
    points = []
    for nodes, rows in ((1, ["q", "s"] * 20), (2, ["q"] * 40 + ["s"] * 40)):
        points.append(point_with(tmp_path, nodes, [(row, quick if row == "q" else slow) for row in rows]))
    found = simulate_series(points, [])
    assert [check.foretold_per_s for check in found.checks] == [check.replayed_per_s for check in found.checks]


def test_rollouts_that_ran_out_of_time_hold_their_slots_but_are_not_done(tmp_path: Path) -> None:
    point = point_with(tmp_path, 1, [("row", 40.0)] * 80, timed_out=20)
    found = simulate_series([point], [])
    assert found.checks[0].replayed_per_s == pytest.approx(0.75 * SLOTS / 40.0, rel=0.06)


def test_few_rollouts_are_named_where_not_even_the_points_own_times_explain_its_rate(tmp_path: Path) -> None:
    points = [recorded(tmp_path, 1), recorded(tmp_path, 2)]
    assert points[1].figures is not None
    slow = msgspec.structs.replace(points[1].figures, steady_per_s=0.7 * points[1].figures.steady_per_s)
    for error, words in ((0.2, "order more (rollouts=)"), (None, "order more (rollouts=)"), (0.01, "no stage counts")):
        figures = msgspec.structs.replace(slow, steady_error=error)
        found = simulate_series([points[0], msgspec.structs.replace(points[1], figures=figures)], [])
        assert not found.valid and words in found.why
        assert "at 2 nodes, of 120 rollouts with RUN 97 % in use" in found.why and "slots were held" not in found.why


def test_the_cost_of_a_saturated_coordinator_takes_the_place_of_the_fit(tmp_path: Path) -> None:
    asked: list[int] = []

    def cost(point: Recorded) -> Coordinator:
        asked.append(point.nodes)
        return Coordinator(1e-6, 0.0, "measured", 1e-9)

    found = simulate_series([recorded(tmp_path, 1), recorded(tmp_path, 4)], [16], cost=cost)
    assert asked == [4]
    assert found.coordinator.how == "measured" and found.points[0].efficiency > 0.9
