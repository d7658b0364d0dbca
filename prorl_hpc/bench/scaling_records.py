"""What a series of scaling runs writes and reads: points, what is ordered of them, what was found.

The folder of a series::

    lock                   held by the one command that measures it
    series.json            Series: every point that is to be measured, in order
    points/<name>.json     PointResult, once a point has ended; a point without one is measured when the series goes on
    points/<name>.run      the run directory of a point that is under way
    results.parquet        every rollout of every point
    summary.json, report.md, plots/*.png, plots/*.svg

A point is one run, launched as every run is; in place of the trainer a load process (bench.point_load) orders what
``LoadOrder`` says and leaves a ``LoadRecord`` in the run directory.
"""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from prorl_hpc.bench.figures import Machine
from prorl_hpc.messages.batch import Refill, WhenFull
from prorl_hpc.messages.codec import read_json
from prorl_hpc.messages.errors import RunError

SERIES_FILE, SUMMARY_FILE, RESULTS_FILE, REPORT_FILE = "series.json", "summary.json", "results.parquet", "report.md"
ORDER_FILE, RECORD_FILE = "bench_order.json", "bench_record.json"
"""In the run directory of a point."""


class LoadOrder(msgspec.Struct, frozen=True):
    """A stream of ``rollouts`` that are all ordered at the start, so that no pool ever waits for orders; or, where
    ``batches`` is not 0, so many batches one after the other, as a DAPO trainer orders them, with ``train_s`` seconds of
    pretended training after each."""

    rollouts: int = 0
    batches: int = 0
    groups: int = 8
    group_size: int = 8
    max_parallel_groups: int = 0
    refill: Refill = Refill.AT_ONCE
    when_full: WhenFull = WhenFull.CANCEL
    train_s: float = 0.0
    seed: int = 0


class BatchNote(msgspec.Struct, frozen=True):
    """``seconds`` from the order to the full batch."""

    seconds: float
    accepted: int
    uniform: int
    groups: int
    """Started in all."""
    ended: float = 0.0
    """When it was full (Unix time)."""


class GaugeSample(msgspec.Struct, frozen=True):
    """What the coordinator said of itself at ``at`` (Unix time): in use of each pool over all workers (init, ready, run,
    eval); of each LLM server the requests that it works on and that wait there."""

    at: float
    pools: dict[str, int]
    running: dict[str, int]
    waiting: dict[str, int]


class LoadRecord(msgspec.Struct):
    """Of the load process. Times are Unix times on its clock. ``ended_at``: when it had each rollout's result.
    ``pool_sizes``: of all workers together."""

    began: float
    ended: float
    ended_at: dict[str, float]
    batches: list[BatchNote]
    trained_s: float
    samples: list[GaugeSample]
    pool_sizes: dict[str, int]
    coordinator_cpu_s: float | None = None
    """CPU time of the coordinator between began and ended."""


class PointSpec(msgspec.Struct, frozen=True):
    """One run of a series. ``overrides``: Hydra's words, complete but for places and names. ``series``: ``nodes`` or the
    name of an ablation; ``variant``: which side of the ablation, empty for ``nodes``."""

    name: str
    nodes: int
    overrides: list[str]
    load: LoadOrder
    series: str = "nodes"
    variant: str = ""
    time_minutes: int = 30


class PointState(enum.StrEnum):
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class Times(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p99: float


class PointFigures(msgspec.Struct, frozen=True):
    """What a point's run came to. Rates are rollouts that are done (status done) per second. ``steady_per_s``: see
    steady_rate; over all where there is none such. Fractions are from 0 to 1; None: does not
    apply (no batches, no engine of the run's own, …)."""

    done: int
    not_done: int
    seconds: float
    per_s: float
    steady_per_s: float
    utilisation: dict[str, float]
    """Of each pool (init, run, eval; ready: mean fill), over the time of ``steady_per_s``."""
    waits: dict[str, Times]
    """Queued before init, run, eval."""
    stages: dict[str, Times]
    """Busy in init, run, eval."""
    turns_per_s: float
    generated_tokens_per_s: float
    tool_call_s: float | None
    """Mean seconds of a tool call beyond what it was told to sleep."""
    batch_s: list[float]
    engine_busy: float | None
    """Share of samples, over all LLM servers, in which a server had at least one request."""
    engine_requests: float | None
    """Mean requests that one LLM server works on."""
    trainer_busy: float | None
    coordinator_s: float | None
    """CPU seconds of the coordinator per rollout that is done."""
    prefix_hit_rate: float | None = None
    """Cached share of all prompt tokens, of engines that count it."""
    freed_s: list[float] = []
    """After each batch, seconds until no LLM server worked on what it had cancelled (bench.freed_engines); only with
    ``LoadOrder.train_s``, a time without orders."""
    restarts: dict[str, int] = {}
    """How often each process of the run that died was started again; those that did not are not in it."""
    short_turns: int = 0
    """Turns of rollouts that are done that had fewer tokens than the workload's row wants."""
    steady_error: float | None = None
    """Relative standard error of ``steady_per_s`` (steady_rate.steady_error); None where it cannot be told."""


class PointResult(msgspec.Struct, frozen=True):
    """``why``: what happened and what to do, if it is not done. ``engine``: what answered, in words for the report, such
    as ``vllm 0.32.0, smollm2-135m`` or ``scripted: first token 0.05 s, …``. ``date``: ISO, of its start. ``commit``: of the
    code that ran (figures.commit_words); empty if it is not known."""

    spec: PointSpec
    state: PointState
    why: str
    run_dir: str
    engine: str
    workload: str
    date: str
    figures: PointFigures | None
    commit: str = ""


class Series(msgspec.Struct, frozen=True):
    """``command``: the words that asked for it. ``place``: local, slurm, or private (a Slurm cluster of its own on this
    machine). ``machine``: this one, before the first point."""

    command: list[str]
    place: str
    points: list[PointSpec]
    machine: Machine | None = None


def point_file(folder: Path, name: str) -> Path:
    return folder / "points" / f"{name}.json"


def read_record(run: Path) -> LoadRecord | None:
    """Of the run directory ``run``; None if it has none. Raises RunError if it is damaged."""
    file = run / RECORD_FILE
    try:
        return read_json(file, LoadRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise RunError(f"{file} cannot be read ({error}): put back a copy of it, or measure the point again") from error
