"""No-op rollouts per second through the real service, against Ray's chains of three tasks on the same machine.

The service: coordinator with its journal, one worker, one LLM server that is never asked, one client over HTTP; each
a process. A rollout counts when the client has its result and the worker its Acknowledge. Ray: a chain of three
no-op tasks, each taking the reference that the one before gave. The two take turns, so that both meet the same noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.load_client import Form, Load, LoadRecord
from prorl_hpc.bench.noop_worker import WorkerRecord
from prorl_hpc.bench.ray_peer import FORMS, TASKS, RayFound, RayPeer
from prorl_hpc.bench.testbed import Testbed
from prorl_hpc.config.schema import RolloutConfig
from prorl_hpc.messages.errors import RunError

GOAL = 3.0
_NAME = "no-op rollouts per second"
_AGAINST = "Ray, chains of three tasks"
_WINDOWS = (200, 1000)


@dataclass(frozen=True)
class Size:
    """``rollouts`` and ``chains`` of one repetition."""

    rollouts: int
    chains: int
    repetitions: int

    @classmethod
    def of(cls, quick: bool) -> Size:
        return cls(4_000, 500, 2) if quick else cls(20_000, 5_000, 5)


def noop_pools() -> RolloutConfig:
    """Slots enough that no pool is the bound."""
    return RolloutConfig(init_slots=256, ready_slots=512, run_slots=512, eval_slots=256)


def measure(quick: bool, say: Callable[[str], None]) -> tuple[list[Figure], float]:
    """The figures, and our rollouts per second."""
    size = Size.of(quick)
    form, ours = _our_best_form(size, say)
    try:
        peer = RayPeer.installed(say)
        survey = _survey(peer, size, say)
    except RunError as error:
        figure = Figure.not_taken(_NAME, "x", _AGAINST, f">= {GOAL:g}", f"{ours:.0f}/s; no peer: {error}")
        return [figure], ours
    return _take_turns(peer, survey, form, size, say)


def without_peer(quick: bool, say: Callable[[str], None]) -> float:
    """Our rollouts per second alone."""
    return _our_best_form(Size.of(quick), say)[1]


def rollouts_per_s(load: Load) -> float:
    """One repetition, everything started anew. RunError if a rollout did not end DONE or was not acknowledged."""
    with Testbed.open(noop_pools(), workers=1) as bed:
        bed.start()
        bed.start_client("client-0", load)
        bed.wait_client("client-0", timeout_s=60 + load.rollouts / 50)
        client = LoadRecord.read(bed.run, "client-0")
        bed.stop()
        worker = WorkerRecord.read(bed.run, "worker-0")
        if client.done != load.rollouts or worker.acknowledged != load.rollouts:
            raise RunError(f"{load.rollouts} ordered, {client.statuses} here, {worker.acknowledged} acknowledged")
        return load.rollouts / (max(client.ended, worker.acknowledged_at) - client.began)


def _our_best_form(size: Size, say: Callable[[str], None]) -> tuple[Form, float]:
    found = {}
    for form in (Form.BATCHES, Form.STREAM):
        found[form] = rollouts_per_s(Load(size.rollouts, form))
        say(f"service, {form}: {found[form]:.0f} rollouts/s")
    best = max(found, key=lambda form: found[form])
    return best, found[best]


def _survey(peer: RayPeer, size: Size, say: Callable[[str], None]) -> dict[str, float]:
    found = peer.measure(size.chains, FORMS, _WINDOWS)
    for form, rate in found.forms.items():
        say(f"Ray {found.ray}, {form}: {rate:.0f} chains/s")
    return found.forms


def _take_turns(
    peer: RayPeer, survey: dict[str, float], form: Form, size: Size, say: Callable[[str], None]
) -> tuple[list[Figure], float]:
    best = {kind: max(_WINDOWS, key=lambda window: survey[_form(kind, window)]) for kind in FORMS}
    fastest = max(FORMS, key=lambda kind: survey[_form(kind, best[kind])])
    ours: list[float] = []
    rays: dict[str, list[float]] = {}
    for number in range(size.repetitions):
        ours.append(rollouts_per_s(Load(size.rollouts, form)))
        for kind in dict.fromkeys((TASKS, fastest)):
            found: RayFound = peer.measure(size.chains, [kind], [best[kind]])
            rays.setdefault(kind, []).extend(found.forms.values())
        told = ", ".join(f"Ray {kind} {rates[-1]:.0f}/s" for kind, rates in rays.items())
        say(f"turn {number + 1} of {size.repetitions}: service {ours[-1]:.0f}/s, {told}")
    rate = statistics.median(ours)
    figures = [_figure(rate, form, size, kind, best[kind], rates) for kind, rates in rays.items()]
    return figures, rate


def _figure(rate: float, form: Form, size: Size, kind: str, window: int, rates: list[float]) -> Figure:
    ray = statistics.median(rates)
    detail = (
        f"service {rate:.0f}/s ({form}, {size.rollouts} rollouts), Ray {ray:.0f}/s ({window} in flight, "
        f"{size.chains} chains); medians of {size.repetitions} turns"
    )
    if kind == TASKS:
        return Figure.at_least(_NAME, rate / ray, GOAL, "x", _AGAINST, detail)
    # Methods of actors that stand still for one purpose are no tasks: told, for whoever would build it so.
    return Figure.told(_NAME, rate / ray, "x", f"Ray, its fastest form tried: {kind}", detail)


def _form(kind: str, window: int) -> str:
    return f"{kind}, {window} in flight"
