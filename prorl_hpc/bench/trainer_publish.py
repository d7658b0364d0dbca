"""New weights into a running vLLM, the whole way, against a plain copy of the same bytes."""

from __future__ import annotations

import shutil
import statistics
import sys

import msgspec

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.inference_bed import InferenceBed, small_model
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.trainer_publisher import Found
from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.trainer.publish import SHARED_MEMORY

_MODEL = "smollm2-135m"
_CONTEXT_TOKENS = 1024
_LIMIT_S = 900.0
CONSTANT_S = 0.75
"""Half a second for messages, vLLM's pause and the probe on both sides; a quarter for packing this model's matrices for the CPU's
kernels, which vLLM does anew after each load."""
_MIB = 1 << 20
_ENGINE_THREADS = 2
"""As in the default run."""


def measure(quick: bool, say: Say) -> list[Figure]:
    """RunError without the model or if an update fails, ConfigError without vLLM."""
    updates = 3 if quick else 12
    disk = _published("disk", updates, say)
    return [*disk_figures(disk), *_direct(disk, updates, say)]


def _direct(disk: Found, updates: int, say: Say) -> list[Figure]:
    """What goes wrong there is told in place of its figure: that of the files stays."""
    try:
        return direct_figures(_published("direct", updates, say), disk)
    except ProrlError as error:
        say(f"trainer.publish=direct broke: {error}")
        return [Figure.not_taken("publish, direct: weight update", "s", "", "", str(error).splitlines()[0])]


def _published(way: str, updates: int, say: Say) -> Found:
    """On servers of its own: versions of weights begin anew there."""
    engine = EngineConfig(kind="vllm", threads=_ENGINE_THREADS)
    with InferenceBed.open(small_model(_MODEL), engine, _CONTEXT_TOKENS, say) as bed:
        say(f"{updates} updates, trainer.publish={way}")
        found = _publish(bed, way, updates)
        say(f"{_median(found, 'total_s'):.2f} s; {_parts(found)}")
        return found


def _publish(bed: InferenceBed, way: str, updates: int) -> Found:
    out = bed.run.state / f"published-{way}.json"
    words = ["--way", way, "--updates", str(updates), "--out", str(out)]
    command = [sys.executable, "-m", "prorl_hpc.bench.trainer_publisher", "--run-dir", str(bed.run.path)]
    bed.processes.start(way, [*command, "--name", "trainer-0", *words])
    try:
        if (code := bed.processes.wait(way, _LIMIT_S)) != 0:
            raise RunError(f"the trainer ended with exit code {code}")
    finally:
        # One that was killed has left its weights in memory.
        shutil.rmtree(bed.run.runtime_dir(str(SHARED_MEMORY)), ignore_errors=True)
    return msgspec.json.decode(out.read_bytes(), type=Found)


def disk_figures(found: Found) -> list[Figure]:
    """Medians over updates."""
    total, copy = _median(found, "total_s"), _median(found, "copy_s")
    against = "a copy of the same files into the same directory"
    size = f"{_MODEL}, {found.weight_bytes / _MIB:.0f} MiB float32, {len(found.updates)} updates of an idle vLLM"
    return [
        Figure.at_most(
            "publish, disk: weight update less the constant",
            max(0.0, total - CONSTANT_S) / copy,
            2.0,
            "x",
            against,
            f"{size}: {total:.2f} s from the trainer's weights to a probe that agrees, the copy {copy:.2f} s; the constant is "
            f"{CONSTANT_S:g} s",
        ),
        Figure.told("publish, disk: weight update", total, "s", "", _parts(found)),
        Figure.told("publish, disk: copy", copy, "s", against),
        _probe("disk", found),
    ]


def direct_figures(found: Found, disk: Found) -> list[Figure]:
    total = _median(found, "total_s")
    return [
        Figure.told("publish, direct: weight update", total, "s", "", _parts(found)),
        Figure.told("publish, direct: weight update", total / _median(disk, "total_s"), "x", "trainer.publish=disk"),
        _probe("direct", found),
    ]


def _probe(way: str, found: Found) -> Figure:
    gap = max(update.gap for update in found.updates)
    return Figure.at_most(f"publish, {way}: largest gap of a probe", gap, 1e-3, "nats", "the trainer's logprobs")


def _parts(found: Found) -> str:
    offer, server = _median(found, "offer_s"), _median(found, "server_s")
    rest = _median(found, "total_s") - offer - server
    parts = f"the trainer's part {offer:.2f} s, the inference agent's {server:.2f} s, the probe's logprobs and messages {rest:.2f} s"
    if found.by_hand:
        parts += "; of the agent's, asked by hand: "
        parts += ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.by_hand.items())
    return parts


def _median(found: Found, field: str) -> float:
    return statistics.median(float(getattr(update, field)) for update in found.updates)
