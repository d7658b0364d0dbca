"""The coordinator's figures in the Prometheus text format.

Labels take few values: stages, kinds, policies of the configuration, names of workers and LLM servers that are there
now; never an id of a
rollout, a batch or a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prorl_hpc.messages.rollout import RolloutResult, Stage
from prorl_hpc.messages.status import RunStatus, ServerStatus
from prorl_hpc.rollout.policy_figures import seconds_of

_STAGE_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
_COMMIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class CoordinatorMetrics:
    """Counts what happens; what stands is taken from RunStatus when it is rendered. Not thread-safe to render."""

    def __init__(self, refused: Callable[[], Mapping[str, int]] = dict) -> None:
        """``refused``: how many messages were refused so far, by the reason (few reasons)."""
        self._registry = CollectorRegistry()
        own = self._registry
        self._accepted = Counter("prorl_rollouts_accepted", "Rollouts accepted", registry=own)
        self._ended = Counter(
            "prorl_rollouts_ended",
            "Rollouts ended, by status and kind of failure",
            ["status", "kind", "policy"],
            registry=own,
        )
        self._reward = Summary("prorl_rollout_reward", "Rewards of rollouts that are done", ["policy"], registry=own)
        self._finishes = Counter(
            "prorl_rollout_finishes", "Why conversations ended", ["policy", "finish"], registry=own
        )
        self._tokens = Counter(
            "prorl_rollout_generated_tokens", "Tokens generated in rollouts that ended", ["policy"], registry=own
        )
        self._seconds = Histogram(
            "prorl_rollout_seconds",
            "Seconds that a rollout which is done took, queues included",
            ["policy"],
            buckets=_STAGE_S,
            registry=own,
        )
        self._retried = Counter("prorl_attempts_retried", "Attempts that were made again elsewhere", registry=own)
        self._queued_s = Histogram(
            "prorl_stage_queued_seconds",
            "Seconds a rollout waited for a slot",
            ["stage"],
            buckets=_STAGE_S,
            registry=own,
        )
        self._busy_s = Histogram(
            "prorl_stage_busy_seconds", "Seconds a rollout spent in a stage", ["stage"], buckets=_STAGE_S, registry=own
        )
        # Looked up once: this is told of every rollout.
        self._stages = {
            stage: (self._queued_s.labels(stage.value), self._busy_s.labels(stage.value)) for stage in Stage
        }
        self._commit_s = Histogram(
            "prorl_journal_commit_seconds", "Seconds that a commit of the journal took", buckets=_COMMIT_S, registry=own
        )
        self._snapshot = _Snapshot(refused)
        self._registry.register(self._snapshot)

    def accepted(self, n: int) -> None:
        self._accepted.inc(n)

    def ended(self, result: RolloutResult) -> None:
        kind = result.failure.kind.value if result.failure is not None else "none"
        self._ended.labels(result.status.value, kind, result.policy).inc()
        for timing in result.timings:
            queued_s, busy_s = self._stages[timing.stage]
            queued_s.observe(timing.queued_s)
            busy_s.observe(timing.busy_s)
        self._tokens.labels(result.policy).inc(result.generated_tokens)
        if result.finish:
            self._finishes.labels(result.policy, result.finish.value).inc()
        if result.reward is not None:
            self._reward.labels(result.policy).observe(result.reward)
            self._seconds.labels(result.policy).observe(seconds_of(result))

    def retried(self) -> None:
        self._retried.inc()

    def journal_committed(self, seconds: float) -> None:
        self._commit_s.observe(seconds)

    def render(self, status: RunStatus) -> bytes:
        self._snapshot.status = status
        return generate_latest(self._registry)


class _Snapshot(Collector):
    """What stands at the moment of the scrape."""

    def __init__(self, refused: Callable[[], Mapping[str, int]]) -> None:
        self.status: RunStatus | None = None
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("prorl_messages_refused", "Messages of agents that were refused", labels=["why"])
        for why, count in sorted(self._refused().items()):
            refused.add_metric([why], count)
        yield refused
        if self.status is not None:
            yield from _run(self.status)
            yield from _workers(self.status)
            yield from _servers(self.status.servers)
            yield from _policies(self.status)


def _gauge(name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _run(status: RunStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("prorl_uptime_seconds", "Seconds since the coordinator started", status.uptime_s)
    yield GaugeMetricFamily("prorl_paused", "1 while no rollout is started", float(status.paused or bool(status.holds)))
    rollouts = _gauge("prorl_rollouts", "Rollouts by status, the finished ones of all attempts of the run", ["status"])
    for name, count in sorted(status.rollouts.items()):
        rollouts.add_metric([name], count)
    yield rollouts


def _workers(status: RunStatus) -> Iterator[Metric]:
    used = _gauge("prorl_worker_slots_in_use", "Slots in use", ["worker", "pool"])
    size = _gauge("prorl_worker_slots", "Slots there are", ["worker", "pool"])
    draining = _gauge("prorl_worker_draining", "1 while the worker gets no new rollouts", ["worker"])
    for worker in status.workers:
        draining.add_metric([worker.worker_id], float(worker.draining))
        for pool, (in_use, slots) in sorted(worker.pools.items()):
            used.add_metric([worker.worker_id, pool], in_use)
            size.add_metric([worker.worker_id, pool], slots)
    yield from (used, size, draining)


_SERVER_GAUGES: tuple[tuple[str, str, Callable[[ServerStatus], float]], ...] = (
    ("prorl_server_assigned_rollouts", "Rollouts assigned to the LLM server", lambda s: s.assigned),
    ("prorl_server_running_requests", "Requests that the engine works on", lambda s: s.running),
    ("prorl_server_waiting_requests", "Requests in the engine's queue", lambda s: s.waiting),
    ("prorl_server_healthy", "1 if the server is well", lambda s: float(s.healthy)),
    ("prorl_server_draining", "1 while the server gets no new rollouts", lambda s: float(s.draining)),
    ("prorl_server_weight_version", "Version of the weights that it serves", lambda s: s.weight_version),
    ("prorl_server_generated_tokens_per_second", "Tokens generated per second, recently", lambda s: s.tokens_per_s),
)


def _servers(servers: list[ServerStatus]) -> Iterator[Metric]:
    for name, text, value in _SERVER_GAUGES:
        gauge = _gauge(name, text, ["server", "policy"])
        for server in servers:
            gauge.add_metric([server.server_id, server.policy], value(server))
        yield gauge


def _policies(status: RunStatus) -> Iterator[Metric]:
    newest = _gauge("prorl_policy_weight_version", "Newest version of the policy's weights", ["policy"])
    eligible = _gauge("prorl_policy_eligible_servers", "Servers that new rollouts may go to", ["policy"])
    for policy in status.policies:
        newest.add_metric([policy.policy], policy.newest_version)
        eligible.add_metric([policy.policy], policy.eligible)
    yield from (newest, eligible)
