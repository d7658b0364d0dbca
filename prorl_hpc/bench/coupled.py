"""Three pools against one: short runs and slow evaluations, at the same number of slots that may use the LLM servers.

A RUN slot is the right to use the LLM servers, which is what a cluster pays for. Coupled, a rollout holds it from INIT
to the end of EVAL; decoupled, only in RUN, and INIT and EVAL have slots of their own, which cost CPU time on the
worker nodes alone. With the same total of slots of all kinds there would be nothing to gain: the work is the same.
The stages sleep, so that the machine is not the bound. The simulator gets the same pools and, one by one, the same
rollouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.load_client import Form, Load, LoadRecord
from prorl_hpc.bench.simulation import simulate
from prorl_hpc.bench.simulation_config import SimulationConfig
from prorl_hpc.bench.simulation_draws import Draws
from prorl_hpc.bench.testbed import Testbed
from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.messages.errors import RunError

GOAL = 3.0
PREDICTION_GOAL = 0.10
WORKERS = 2
RUN_SLOTS, EVAL_SLOTS = 16, 96
"""Of each worker. EVAL slots for nearly 1.5 times what the RUN slots feed."""


def pools(*, coupled: bool) -> RolloutConfig:
    """Of each worker: RUN_SLOTS either way."""
    return RolloutConfig(init_slots=8, ready_slots=16, run_slots=RUN_SLOTS, eval_slots=EVAL_SLOTS, coupled=coupled)


def simulation(rollouts: int, *, coupled: bool) -> SimulationConfig:
    """Short runs, and evaluations of which one in five is slow: mean RUN 0.2 s, mean EVAL 0.85 s."""
    settings = pools(coupled=coupled)
    return SimulationConfig(
        rollouts=rollouts,
        nodes=WORKERS,
        slots=settings.run_slots,
        init_slots=settings.init_slots,
        ready_slots=settings.ready_slots,
        eval_slots=settings.eval_slots,
        coupled=coupled,
        init="constant:0.02",
        run="uniform:0.1:0.3",
        eval="0.8*uniform:0.2:0.8+0.2*uniform:1.5:3.0",
        servers=1,
        plot="",
    )


def measure(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    rollouts = 600 if quick else 3600
    measured: dict[bool, float] = {}
    predicted: dict[bool, float] = {}
    for coupled in (False, True):
        config = simulation(rollouts, coupled=coupled)
        predicted[coupled] = simulate(config).throughput_per_s
        measured[coupled] = _measured(config)
        word = "coupled" if coupled else "decoupled"
        say(f"{word}: {measured[coupled]:.1f} rollouts/s measured, {predicted[coupled]:.1f} predicted")
    detail = (
        f"{measured[False]:.1f}/s against {measured[True]:.1f}/s; {rollouts} rollouts, RUN 0.1–0.3 s, EVAL 0.2–3 s; "
        f"{RUN_SLOTS * WORKERS} RUN slots either way, {EVAL_SLOTS * WORKERS} EVAL slots of their own when decoupled"
    )
    ratio = measured[False] / measured[True]
    return [
        Figure.at_least("decoupled stages", ratio, GOAL, "x", "one coupled pool", detail),
        *(_prediction(coupled, predicted[coupled], measured[coupled]) for coupled in (False, True)),
    ]


def _prediction(coupled: bool, predicted: float, measured: float) -> Figure:
    name = f"simulator's error, {'coupled' if coupled else 'decoupled'}"
    detail = f"predicted {predicted:.1f}/s, measured {measured:.1f}/s"
    return Figure.below(name, abs(predicted / measured - 1), PREDICTION_GOAL, "of the measured", "measured", detail)


def _measured(config: SimulationConfig) -> float:
    rollouts = config.rollouts
    with Testbed.open(pools(coupled=config.coupled), WORKERS) as bed:
        bed.start()
        rows = [
            {"init_s": init_s, "run_s": run_s, "eval_s": eval_s}
            for init_s, run_s, eval_s, *_ in itertools.islice(Draws(config).fates(0), rollouts)
        ]
        bed.start_client("client-0", Load(rollouts, Form.STREAM, in_flight=rollouts, rows=rows))
        bed.wait_client("client-0", timeout_s=60 + rollouts / 10)
        record = LoadRecord.read(bed.run, "client-0")
        bed.stop()
    if record.done != rollouts:
        raise RunError(f"{rollouts} rollouts were ordered, these came: {record.statuses}")
    return rollouts / (record.ended - record.began)
