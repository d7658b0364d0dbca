"""The policies side by side, each against the product's own, on the same draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from prorl_hpc.bench.simulation import SimulationResult, simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.messages.batch import Refill

OWN = "decoupled, least in flight, refill at once"


@dataclass(frozen=True)
class Comparison:
    """``results``: our own policy first. ``left_out``: policies that would change nothing, and why."""

    results: dict[str, SimulationResult]
    left_out: dict[str, str]

    @property
    def gain(self) -> dict[str, float]:
        """How many times as fast our own policy is: in time to a batch where there are batches, else in throughput."""
        own = self.results[OWN]
        return {name: _gain(own, other) for name, other in self.results.items() if name != OWN}


def compare(
    config: SimulationConfig, look: Callable[[str], Callable[[int, float], None] | None] = lambda name: None
) -> Comparison:
    """Run our own policy and one change of it at a time; ``look(name)`` gives the display of each. What ``config``
    says of these policies does not count. Raises as ``simulate``."""
    config.check()
    own = dataclasses.replace(config, coupled=False, balancing="least_in_flight", refill=Refill.AT_ONCE.value)
    variants = {
        OWN: own,
        "one coupled pool": dataclasses.replace(own, coupled=True),
        "round robin": dataclasses.replace(own, balancing="round_robin"),
        "synchronous batches": dataclasses.replace(own, refill=Refill.IN_ROUNDS.value),
    }
    left_out = {}
    if not config.server_concurrency:
        left_out["round robin"] = "no server has a limit, so its load does not matter: set server_concurrency"
    elif config.servers == 1:
        left_out["round robin"] = "there is one server"
    if not config.groups_per_batch:
        left_out["synchronous batches"] = "there are no batches: set groups_per_batch"
    elif not config.uniform_share:
        left_out["synchronous batches"] = "no group is dropped and replaced: set uniform_share"
    results = {name: simulate(variant, look(name)) for name, variant in variants.items() if name not in left_out}
    return Comparison(results, left_out)


def _gain(own: SimulationResult, other: SimulationResult) -> float:
    if own.batch_mean_s is not None and other.batch_mean_s is not None:
        return other.batch_mean_s / own.batch_mean_s if own.batch_mean_s else 0.0
    return own.throughput_per_s / other.throughput_per_s if other.throughput_per_s else 0.0
