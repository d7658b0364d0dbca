"""The coordinator's figures, read back with Prometheus's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutResult, Stage, StageTiming, Status
from prorl_hpc.messages.status import PolicyStatus, RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.rollout.metrics import CoordinatorMetrics


def run_status(**changes: object) -> RunStatus:
    worker = WorkerStatus("w0", "n", "local", {"run": [3, 16], "init": [0, 4]}, draining=True)
    server = ServerStatus("s0", "n", "vllm", "m", True, 7, 5, 4, 1, 1000, 12.5)
    values: dict[str, object] = {
        "run_id": "r", "time": 0.0, "uptime_s": 9.0, "rollouts": {"run": 3, "done": 8}, "workers": [worker],
        "servers": [server], "batches": [], "rollouts_per_s": 1.0, "paused": True,
        "policies": [PolicyStatus("policy", 7, 1, 1)],
    }  # fmt: skip
    return RunStatus(**(values | changes))  # type: ignore[arg-type]


def read(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.values()))): s.value for family in families for s in family.samples}


def test_what_happened_is_counted() -> None:
    metrics = CoordinatorMetrics(lambda: {"bad_frame": 2})
    metrics.accepted(10)
    metrics.retried()
    metrics.journal_committed(0.002)
    timings = [StageTiming(Stage.RUN, 1.5, 20.0)]
    metrics.ended(RolloutResult("a", "", 0, "t", Status.DONE, 1.0, timings=timings))
    broken = Failure(Stage.INIT, FailureKind.SANDBOX, "it broke")
    metrics.ended(RolloutResult("b", "", 0, "t", Status.FAILED, failure=broken))
    found = read(metrics.render(run_status()))
    assert found["prorl_rollouts_accepted_total", ()] == 10
    assert found["prorl_attempts_retried_total", ()] == 1
    assert found["prorl_rollouts_ended_total", ("done", "none", "policy")] == 1
    assert found["prorl_rollouts_ended_total", ("failed", "policy", "sandbox")] == 1
    assert found["prorl_messages_refused_total", ("bad_frame",)] == 2
    assert found["prorl_stage_queued_seconds_sum", ("run",)] == 1.5
    assert found["prorl_stage_busy_seconds_sum", ("run",)] == 20.0
    assert found["prorl_journal_commit_seconds_count", ()] == 1


def test_what_stands_is_shown() -> None:
    found = read(CoordinatorMetrics().render(run_status()))
    assert found["prorl_rollouts", ("run",)] == 3
    assert found["prorl_worker_slots_in_use", ("run", "w0")] == 3
    assert found["prorl_worker_slots", ("run", "w0")] == 16
    assert found["prorl_worker_draining", ("w0",)] == 1
    assert found["prorl_server_assigned_rollouts", ("policy", "s0")] == 5
    assert found["prorl_server_running_requests", ("policy", "s0")] == 4
    assert found["prorl_server_weight_version", ("policy", "s0")] == 7
    assert found["prorl_policy_eligible_servers", ("policy",)] == 1
    assert found["prorl_paused", ()] == 1


def test_agents_that_left_leave_nothing_behind() -> None:
    metrics = CoordinatorMetrics()
    metrics.render(run_status())
    assert not any(
        "w0" in labels or "s0" in labels for _, labels in read(metrics.render(run_status(workers=[], servers=[])))
    )


def test_names_are_ours_and_rollouts_are_no_labels() -> None:
    metrics = CoordinatorMetrics()
    before = len(read(metrics.render(run_status())))
    for i in range(100):
        metrics.ended(RolloutResult(f"r{i}", f"g{i}", 0, f"task{i}", Status.DONE, worker=f"w{i}", server=f"s{i}"))
    found = read(metrics.render(run_status()))
    assert len(found) == before + 4  # a count of ends and one of tokens, and when they were made
    assert all(name.startswith("prorl_") for name, _ in found)
