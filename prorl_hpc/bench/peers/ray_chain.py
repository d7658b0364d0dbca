"""Run by path with the Python of Ray's own environment: chains of three no-op tasks per second, in several forms.

Writes one JSON object to --out: {"ray": version, "chains": n, "forms": {form: chains per second}}. Ray is shut down at the end.
"""

# mypy: ignore-errors
# (Ray is not in the environment that is checked.)

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray


@ray.remote
def step(value: int) -> int:
    return value


@ray.remote
class Stage:
    def step(self, value: int) -> int:
        return value


def chained_tasks(count: int) -> None:
    """Every chain is three tasks; all are submitted, then all results are fetched in one get."""
    ray.get([step.remote(step.remote(step.remote(number))) for number in range(count)])


def one_actor_per_chain(actors: list[Any]) -> Callable[[int], None]:
    """Each chain's three calls go to one actor, so that no value leaves its process."""

    def run(count: int) -> None:
        refs = []
        for number in range(count):
            actor = actors[number % len(actors)]
            refs.append(actor.step.remote(actor.step.remote(actor.step.remote(number))))
        ray.get(refs)

    return run


def pipeline_of_actors(first: Any, second: Any, third: Any) -> Callable[[int], None]:
    """An actor per stage."""

    def run(count: int) -> None:
        ray.get([third.step.remote(second.step.remote(first.step.remote(number))) for number in range(count)])

    return run


def per_second(run: Callable[[int], None], chains: int, window: int) -> float:
    """After a warm-up of one window: ``chains`` chains, ``window`` of them in flight."""
    run(window)
    began = time.perf_counter()
    left = chains
    while left > 0:
        run(min(window, left))
        left -= window
    return chains / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chains", type=int, required=True)
    parser.add_argument("--windows", type=int, nargs="+", required=True)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forms", nargs="+", required=True)
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=arguments.temp_dir,
        logging_level="error",
    )
    try:
        forms: dict[str, Callable[[int], None]] = {"chained tasks": chained_tasks}
        # Actors that ask for no CPU leave the tasks theirs: Ray counts CPUs only on paper.
        actors = [Stage.options(num_cpus=0).remote() for _ in range(max(3, cores))]
        forms["one actor per chain"] = one_actor_per_chain(actors[:cores])
        forms["a pipeline of actors"] = pipeline_of_actors(*actors[:3])
        found = {
            f"{name}, {window} in flight": per_second(forms[name], arguments.chains, window)
            for name in arguments.forms
            for window in arguments.windows
        }
        arguments.out.write_text(json.dumps({"ray": ray.__version__, "chains": arguments.chains, "forms": found}))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
