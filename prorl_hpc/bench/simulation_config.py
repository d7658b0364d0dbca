"""Settings of a simulation, from ``name=value`` arguments and YAML files."""

from __future__ import annotations

import difflib
import math
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prorl_hpc.bench.simulation_times import GRAMMAR, parse_distribution
from prorl_hpc.messages.batch import Refill, WhenFull
from prorl_hpc.messages.control import Pools
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.rollout import Budgets


def _setting(default: Any, meaning: str) -> Any:
    """``meaning`` is what ``simulate --help`` says."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass
class WorkloadConfig:
    """One kind of rollout of a mixed workload; an empty time is that of the simulation."""

    weight: float = 1.0
    init: str = ""
    run: str = ""
    eval: str = ""


@dataclass
class SimulationConfig:
    """Every setting; times are seconds of virtual time. ``meaning`` in the fields' metadata says what each is."""

    rollouts: int = _setting(100_000, "rollouts in all; with batches, those that the wanted groups need")
    nodes: int = _setting(16, "CPU nodes, one worker each")
    slots: int = _setting(64, "RUN slots of a node")
    init_slots: int = _setting(0, "INIT slots of a node; 0: init_ratio of slots")
    ready_slots: int = _setting(0, "prepared sandboxes that a node holds READY; 0: ready_ratio of slots")
    eval_slots: int = _setting(0, "EVAL slots of a node; 0: eval_ratio of slots")
    init_ratio: float = _setting(0.125, "INIT slots per RUN slot")
    ready_ratio: float = _setting(0.5, "READY sandboxes per RUN slot; 0: no READY buffer")
    eval_ratio: float = _setting(0.125, "EVAL slots per RUN slot")
    coupled: bool = _setting(False, "one pool of RUN slots, each held from INIT to the end of EVAL, instead of three")
    init: str = _setting("lognormal:2:0.5", f"time of INIT: {GRAMMAR}")
    run: str = _setting("lognormal:30:0.7", "time of RUN at full speed, likewise")
    eval: str = _setting("lognormal:2:0.7", "time of EVAL, likewise")
    workloads: dict[str, WorkloadConfig] = field(
        default_factory=dict,
        metadata={"meaning": "kinds of rollouts that are mixed: workloads.NAME.weight=, .init=, .run=, .eval="},
    )
    recorded: str = _setting("", "directory of a run whose finished rollouts give the times of all three stages")
    straggler_share: float = _setting(0.0, "share of the rollouts whose RUN takes straggler_factor times as long")
    straggler_factor: float = _setting(5.0, "see straggler_share")
    servers: int = _setting(8, "LLM servers")
    server_concurrency: float = _setting(0.0, "requests that a server works on at full speed; 0: any number")
    generation_share: float = _setting(0.7, "share of RUN that the LLM server works (with server_concurrency)")
    turns: int = _setting(1, "times that a RUN goes back and forth between server and sandbox")
    balancing: str = _setting(
        "least_in_flight", "least_in_flight or round_robin: how a server is chosen, once per rollout"
    )
    abort_cancelled: bool = _setting(True, "stop at once what is cancelled in RUN; false: it goes on to the end of RUN")
    arrivals: str = _setting("", "time between arrivals, as for init; empty: the queue never runs dry")
    group_size: int = _setting(8, "samples of one prompt")
    groups_per_batch: int = _setting(0, "groups that a batch (a training step) wants; 0: no batches, one stream")
    uniform_share: float = _setting(0.0, "share of the groups whose rewards are all equal: dropped and replaced")
    refill: str = _setting("at_once", "at_once or in_rounds (synchronous): when dropped groups are replaced")
    when_full: str = _setting("cancel", "cancel or carry: what becomes of groups in flight when a batch is full")
    max_parallel_groups: int = _setting(0, "groups in flight at most, spares included; 0: groups_per_batch")
    train_s: float = _setting(0.0, "from a full batch to the order of the next")
    init_failures: float = _setting(0.0, "probability that INIT breaks (an infrastructure fault)")
    run_failures: float = _setting(0.0, "probability that RUN breaks")
    eval_failures: float = _setting(0.0, "probability that EVAL breaks")
    retries: int = _setting(2, "attempts beyond the first after infrastructure faults")
    node_mtbf_s: float = _setting(0.0, "mean time between failures of a node; 0: nodes do not fail")
    node_down_s: float = _setting(300.0, "time until a node that failed is back")
    lost_after_s: float = _setting(20.0, "silence after which a node is taken as lost")
    server_mtbf_s: float = _setting(0.0, "mean time between failures of an LLM server; 0: servers do not fail")
    server_down_s: float = _setting(120.0, "time until a server that failed is back")
    when_server_lost: str = _setting("move", "move or retry: what becomes of the RUNs of a server that failed")
    init_budget_s: float = _setting(0.0, "budget of INIT; 0: none")
    run_budget_s: float = _setting(0.0, "budget of RUN; 0: none")
    eval_budget_s: float = _setting(0.0, "budget of EVAL; 0: none")
    total_budget_s: float = _setting(0.0, "budget of all three stages; 0: none")
    wall_budget_s: float = _setting(0.0, "cap on the whole life of a rollout, queues included; 0: none")
    coordinator_s: float = _setting(
        0.0, "CPU time of the coordinator per rollout, one message after the other; 0: none"
    )
    latency_s: float = _setting(0.0, "one way between coordinator and worker; each stage takes two ways more")
    seed: int = _setting(0, "of every random number; the same seed gives the same simulation")
    plot: str = _setting("simulation.png", "file of the plot; empty: none")

    @property
    def pools(self) -> Pools:
        """A node's pools."""

        def sized(given: int, ratio: float) -> int:
            return given or (max(1, round(ratio * self.slots)) if ratio else 0)

        return Pools(
            init=sized(self.init_slots, self.init_ratio),
            ready=sized(self.ready_slots, self.ready_ratio),
            run=self.slots,
            eval=sized(self.eval_slots, self.eval_ratio),
            coupled=self.coupled,
        )

    @property
    def budgets(self) -> Budgets:
        """A rollout's budgets, infinite where there are none."""

        def limit(seconds: float) -> float:
            return seconds or math.inf

        return Budgets(
            init_s=limit(self.init_budget_s),
            run_s=limit(self.run_budget_s),
            eval_s=limit(self.eval_budget_s),
            total_s=limit(self.total_budget_s),
            wall_s=limit(self.wall_budget_s),
        )

    def check(self) -> None:
        """Raise ConfigError, naming every setting that is out of its range."""
        wrong = [f"{name}={getattr(self, name)}: {text}" for names, text, good in _RANGES for name in names.split()
                 if not good(getattr(self, name))]  # fmt: skip
        for name in ("init", "run", "eval"):
            parse_distribution(getattr(self, name), name)
        if self.arrivals:
            parse_distribution(self.arrivals, "arrivals")
            if self.groups_per_batch:
                wrong.append("arrivals and groups_per_batch: a batch is ordered at once, give one of them")
        for kind, workload in self.workloads.items():
            for name in ("init", "run", "eval"):
                if text := getattr(workload, name):
                    parse_distribution(text, f"workloads.{kind}.{name}")
            if not (math.isfinite(workload.weight) and workload.weight > 0):
                wrong.append(f"workloads.{kind}.weight={workload.weight}: must be above 0")
        if self.recorded and self.workloads:
            wrong.append("recorded and workloads: both say what times the stages take, give one of them")
        if wrong:
            raise ConfigError("; ".join(wrong))


def _one_of(*allowed: str) -> tuple[str, Any]:
    return f"must be {' or '.join(allowed)}", lambda value: value in allowed


def _finite(value: float) -> bool:
    return math.isfinite(value)


_RANGES: list[tuple[str, str, Any]] = [
    ("rollouts nodes slots servers group_size turns", "must be at least 1", lambda v: v >= 1),
    (
        "init_slots ready_slots eval_slots groups_per_batch max_parallel_groups retries seed",
        "must not be negative",
        lambda v: v >= 0,
    ),
    ("init_ratio eval_ratio node_down_s server_down_s", "must be above 0", lambda v: _finite(v) and v > 0),
    (
        "ready_ratio coordinator_s server_concurrency train_s lost_after_s node_mtbf_s server_mtbf_s latency_s init_budget_s run_budget_s "
        "eval_budget_s total_budget_s wall_budget_s",
        "must be finite and not negative",
        lambda v: _finite(v) and v >= 0,
    ),
    ("straggler_factor", "must be above 0", lambda v: _finite(v) and v > 0),
    ("straggler_share generation_share", "must be from 0 to 1", lambda v: 0 <= v <= 1),
    ("uniform_share init_failures run_failures eval_failures", "must be from 0 to below 1", lambda v: 0 <= v < 1),
    ("balancing", *_one_of("least_in_flight", "round_robin")),
    ("when_server_lost", *_one_of("move", "retry")),
    ("refill", *_one_of(*(refill.value for refill in Refill))),
    ("when_full", *_one_of(*(when.value for when in WhenFull))),
]


def settings() -> list[tuple[str, Any, str]]:
    """(name, default, meaning) of every setting."""

    def default(setting: Field[Any]) -> Any:
        return getattr(SimulationConfig(), setting.name)

    return [(setting.name, default(setting), setting.metadata["meaning"]) for setting in fields(SimulationConfig)]


def read_config(overrides: list[str], file: Path | None = None) -> SimulationConfig:
    """The file's settings, then the overrides. Raises ConfigError with the nearest names for a typo."""
    merged = OmegaConf.structured(SimulationConfig)
    try:
        if file is not None:
            loaded = OmegaConf.load(file)
            if not isinstance(loaded, DictConfig):
                raise ConfigError(f"{file} must hold settings, `name: value`")
            merged = OmegaConf.merge(merged, loaded)
        for override in overrides:
            name, equals, value = override.partition("=")
            if not equals or not name:
                raise ConfigError(f"{override!r} is not a setting: write name=value. {_nearest(name)}")
            # Nothing would be YAML's null.
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([override if value else f'{name}=""']))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"the settings cannot be read: {error}") from error
    assert isinstance(config, SimulationConfig)
    config.check()
    return config


def _explain(error: OmegaConfBaseException) -> str:
    name = error.full_key or ""
    if "not in" in str(error):
        return f"there is no setting {name}. {_nearest(name)}"
    return f"{name}: {str(error).splitlines()[0]}"


def _nearest(name: str) -> str:
    names = [known for known, _, _ in settings()]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}`simulate --help` lists every setting"
