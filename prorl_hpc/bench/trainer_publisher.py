"""``python -m prorl_hpc.bench.trainer_publisher --run-dir DIR --name NAME --way WAY --updates N --out FILE``: one trainer
rank that publishes its weights to the servers of a run again and again, as a training loop does, and copies the same
bytes in between."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_hpc.bench.trainer_batch import BatchSize, FixedBatch, vocabulary_of
from prorl_hpc.bench.vllm_door import VllmDoor
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig, TrainerConfig
from prorl_hpc.messages.codec import write_json
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate, WeightUpdated
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.trainer.__main__ import ENVIRONMENT

if TYPE_CHECKING:
    from prorl_hpc.trainer.publisher import Publisher

_SMALL = BatchSize(1, 2, (8, 8), (8, 8))
_LEARNING_RATE = 1e-6


class Published(msgspec.Struct, frozen=True):
    """One weight update, in seconds. ``offer_s``: until the weights are there to be fetched (files are written);
    ``server_s``: what the inference agent needed, of ``total_s``. ``copy_s``: a plain copy of the same files into the
    same directory, not synced, as the files of weights are not; 0 where there are none. ``gap``: of the probe, nats."""

    total_s: float
    offer_s: float
    server_s: float
    copy_s: float
    gap: float


class Found(msgspec.Struct, frozen=True):
    """``by_hand``: seconds of each request to vLLM that an update consists of, asked one by one."""

    weight_bytes: int
    updates: list[Published]
    by_hand: dict[str, float]


class _Noted:
    """A publisher and a service in one, with what passes through them."""

    def __init__(self, publisher: Publisher, service: RolloutClient) -> None:
        self._publisher, self._service = publisher, service
        self.offer_s = 0.0
        self.update = WeightUpdate(0, [])
        self.answers: list[WeightUpdated] = []

    async def offer(self, version: int, probe: WeightProbe) -> WeightUpdate:
        began = time.perf_counter()
        self.update = await self._publisher.offer(version, probe)
        self.offer_s = time.perf_counter() - began
        return self.update

    def delivered(self) -> None:
        self._publisher.delivered()

    def close(self) -> None:
        self._publisher.close()

    async def update_weights(self, update: WeightUpdate) -> list[WeightUpdated]:
        self.answers = await self._service.update_weights(update)
        return self.answers


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--way", required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level="WARNING")
    run = RunDirectory.open(args.run_dir)
    trainer = TrainerConfig(
        dtype="float32", zero_stage=0, publish=args.way, threads=len(os.sched_getaffinity(0)), overlong_filtering=False
    )
    config = dataclasses.replace(run.load_config(), trainer=trainer)
    write_json(args.out, asyncio.run(publish(config, run, args.updates)))
    return 0


async def publish(config: ProrlConfig, run: RunDirectory, updates: int) -> Found:
    """Versions 1 to ``updates``, each of other weights. RunError if the servers do not take one."""
    from prorl_hpc.trainer.batches import training_batch
    from prorl_hpc.trainer.crew import Crew, Rank
    from prorl_hpc.trainer.publish import probe_tokens
    from prorl_hpc.trainer.publisher import make_publisher
    from prorl_hpc.trainer.served_weights import ServedWeights
    from prorl_hpc.trainer.stopping import StopSignal

    model, stop, crew = Path(config.model.path), StopSignal(), Crew()
    rank = await crew.load(lambda: Rank(config, run, stop, rank=0, world=1, host="127.0.0.1"))
    weight_bytes = rank.engine.weight_bytes
    publisher = make_publisher(
        config.trainer.publish, crew, run, host="127.0.0.1", single_node=True, weight_bytes=weight_bytes
    )
    batch = training_batch(FixedBatch.draw(_SMALL, vocabulary_of(model)).as_result(), config.trainer)
    found, requests = [], {}
    async with RolloutClient.for_run(run.path) as client:
        noted = _Noted(publisher, client)
        weights = ServedWeights(config, run, noted, crew, noted, stop, probe_tokens(model))  # type: ignore[arg-type]
        try:
            for version in range(1, updates + 1):
                await crew.train(batch, _LEARNING_RATE)
                began = time.perf_counter()
                gap = await weights.publish(version)
                total_s = time.perf_counter() - began
                server_s = max(answer.seconds for answer in noted.answers)
                found.append(Published(total_s, noted.offer_s, server_s, copied_s(noted.update.paths), gap or 0.0))
            if noted.update.paths:
                requests = await by_hand(run.runtime_dir(config.run.runtime_root), noted.update, updates + 1)
        finally:
            publisher.close()
            await crew.close()
    return Found(weight_bytes, found, requests)


async def by_hand(runtime: Path, update: WeightUpdate, version: int) -> dict[str, float]:
    """The same update once more as ``version``, past the inference agent, and the probe."""
    (socket,) = runtime.glob("*-vllm.sock")
    assert update.probe is not None
    probe = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    requests: dict[str, tuple[str, Any]] = {
        "pause": ("/pause?mode=keep", None),
        "start": ("/start_weight_update", None),
        "load": ("/update_weights", {"update_info": {"paths": update.paths}}),
        "finish": ("/finish_weight_update", {"weight_version": str(version)}),
        "reset of the prefix cache": ("/reset_prefix_cache", None),
        "resume": ("/resume", None),
    }
    door, seconds = VllmDoor(socket), {}
    try:
        for name, (route, body) in requests.items():
            began = time.perf_counter()
            await door.post(route, body)
            seconds[name] = time.perf_counter() - began
        began = time.perf_counter()
        await door.generate(update.probe.token_ids, probe)
        seconds["probe"] = time.perf_counter() - began
    finally:
        await door.close()
    return seconds


def copied_s(paths: list[str]) -> float:
    """Seconds for a copy of all ``paths`` beside them; it is removed again, not timed."""
    copies = [(Path(path), Path(f"{path}.copy")) for path in paths]
    began = time.perf_counter()
    for source, copy in copies:
        shutil.copyfile(source, copy)
    seconds = time.perf_counter() - began
    for _, copy in copies:
        copy.unlink()
    return seconds if copies else 0.0


if __name__ == "__main__":
    raise SystemExit(main())
