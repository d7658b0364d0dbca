"""``bench fit``: a latency model of a real engine, from a run that recorded its requests (engine.record_requests).

What comes out are settings of the scripted engine; what was held out of the fit says how far they can be trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from prorl_hpc.bench.fit_rows import (
    COLUMNS,
    GENERATED,
    RUNNING,
    UNCACHED,
    Floats,
    Rows,
    non_negative_least_squares,
    rows_of,
)
from prorl_hpc.cli.composition_choices import read_as
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.script_settings import latency_words, script_settings
from prorl_hpc.config.store import own_conf_dir
from prorl_hpc.inference.request_records import RequestRecord, ServerRequests, read_requests
from prorl_hpc.messages.errors import ConfigError

LEAST_REQUESTS = 100
_HELD_OUT = 0.25
_ROUNDS = 20
_ALIKE = 0.995
"""Columns that are correlated more than this cannot be told apart."""
_DIGITS = 4
_WORST_ERROR = 0.5
_ROUGH = 0.15
"""More than this share of itself to either side, and a setting is said to be known only roughly."""
_CACHE_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")

_LEAST_SPREAD = {
    UNCACHED: (
        100.0,
        "their prompts are about equally long: mix short and long ones (bench=mixed), or let fewer be cached",
    ),
    GENERATED: (
        10.0,
        "their turns are about equally long: mix short and long ones (bench=mixed, task.max_turn_tokens)",
    ),
    RUNNING: (
        1.0,
        "the load is always the same: let rollouts begin and end in turn, with rollout.run_slots of 4 or more",
    ),
}
"""From the 5th to the 95th percentile, and what to do about less."""


@dataclass(frozen=True)
class LatencyFit:
    """``settings``: of engine.script. Errors are |predicted − measured| / measured of requests that were held out.
    ``throughput_error``: by how much all of their seconds together are predicted wrongly, with its sign."""

    settings: dict[str, float | int | str]
    source: str
    requests: int
    held_out: int
    median_error: float
    p90_error: float
    throughput_error: float
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """For people."""
        lines = [
            f"Latency model of {self.source}, from {self.requests} requests:",
            f"  {latency_words(script_settings({k: v for k, v in self.settings.items() if k != 'fitted'}))}",
            f"  {self.held_out} requests that were held out: half of them are predicted within {self.median_error:.1%}, "
            f"nine of ten within {self.p90_error:.1%}; their seconds in all are off by {self.throughput_error:+.1%}",
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def yaml(self) -> str:
        """A file of the Hydra group ``latency``."""
        comment = "\n".join(f"# {line.strip()}" for line in self.text().splitlines())
        body = msgspec.yaml.encode({"engine": {"kind": "scripted", "script": self.settings}}).decode()
        return f"# @package _global_\n{comment}\n{body}"


def fit(run_dir: Path) -> LatencyFit:
    """ConfigError if the run recorded too little, or too much of the same, with what to do."""
    run = RunDirectory.open(run_dir.resolve(), to_read=True)
    config = run.load_config()
    if not any(run.requests.glob("*.jsonl")):
        raise ConfigError(
            f"{run_dir} has recorded no requests: run it with engine.record_requests=true (now it is "
            f"{str(config.engine.record_requests).lower()}), with the engine that is to be modelled"
        )
    servers = read_requests(run.requests)
    records = [server.records for server in servers]
    cache, notes = _cache_settings(run, config, records)
    notes += tuple(
        f"requests/{server.server}.jsonl, line {', '.join(map(str, server.cut_lines))}: left out, for the end of the agent "
        "cut it off"
        for server in servers
        if server.cut_lines
    )
    return fit_records(records, str(run_dir), _source(run, config, servers), cache, notes)


def fit_records(
    servers: list[list[RequestRecord]],
    where: str,
    source: str,
    cache: dict[str, int],
    notes: tuple[str, ...] = (),
) -> LatencyFit:
    """Of each server its requests. ``where`` names them in errors, ``source`` in the fit; ``cache``: settings that are no
    times."""
    rows = rows_of(servers)
    _check(rows, where)
    weights = 1 / rows.seconds  # relative errors: a short turn counts as much as a long one
    features, ones = rows.features * weights[:, None], np.ones(len(rows))
    held_out = np.random.default_rng(0).random(len(rows)) < _HELD_OUT
    _check_columns(features[~held_out], where)
    found = _robust(features[~held_out], ones[~held_out])
    predicted = features[held_out] @ found
    errors = np.abs(predicted - 1)
    measured_s = rows.seconds[held_out]
    left = np.log(np.maximum(features[~held_out] @ found, 1e-9))
    settings: dict[str, float | int | str] = {
        name: _rounded(value) for name, value in zip(COLUMNS, found, strict=True) if value > 0
    }
    jitter = 1.4826 * float(
        np.median(np.abs(left - np.median(left)))
    )  # of a normal distribution, by its median deviation
    settings |= ({"jitter": _rounded(jitter)} if jitter > 1e-3 else {}) | cache | {"fitted": source}
    median, in_all = float(np.median(errors)), float((predicted * measured_s).sum() / measured_s.sum() - 1)
    _check_fit(settings, median, in_all, where)
    return LatencyFit(
        settings=settings,
        source=source,
        requests=len(rows),
        held_out=int(held_out.sum()),
        median_error=median,
        p90_error=float(np.quantile(errors, 0.9)),
        throughput_error=in_all,
        notes=notes + _rough(features[~held_out], ones[~held_out], found),
    )


def _robust(features: Floats, wanted: Floats) -> Floats:
    """The least sum of absolute errors, by reweighting least squares: a pause of the machine that hit a few requests
    does not count as the engine's."""
    found = non_negative_least_squares(features, wanted)
    for _ in range(_ROUNDS):
        scale = 1 / np.sqrt(np.maximum(np.abs(features @ found - wanted), 0.01))
        found = non_negative_least_squares(features * scale[:, None], wanted * scale)
    return found


def _rough(features: Floats, wanted: Floats, found: Floats) -> tuple[str, ...]:
    """Settings that the requests tell only roughly. Of the least sum of absolute errors the variance is π/2 · σ² · (FᵀF)⁻¹
    (Bassett and Koenker, Asymptotic Theory of Least Absolute Error Regression, 1978, for normal errors); nine of ten are within 1.645 of its
    roots."""
    used = found > 0
    some, values = features[:, used], found[used]
    sigma = 1.4826 * float(np.median(np.abs(some @ values - wanted)))
    ranges = 1.645 * sigma * np.sqrt(np.pi / 2 * np.diag(np.linalg.pinv(some.T @ some)))
    names = [name for name, is_used in zip(COLUMNS, used, strict=True) if is_used]
    rough = [
        f"{name} ±{wide / value:.0%}"
        for name, value, wide in zip(names, values, ranges, strict=True)
        if wide > _ROUGH * value
    ]
    if not rough:
        return ()
    return (
        f"told only roughly, for requests spend little of their time there: {', '.join(rough)}; more requests tell more",
    )


def _check_fit(
    settings: Mapping[str, float | int | str], median_error: float, throughput_error: float, where: str
) -> None:
    """Numbers come out of any records; a model does not."""
    if not max(median_error, abs(throughput_error)) <= _WORST_ERROR:
        raise ConfigError(
            f"{where}: half of the requests that were held out are predicted more than {median_error:.0%} wrong, their seconds "
            f"in all {throughput_error:+.0%}; a model is at most {_WORST_ERROR:.0%} off. They do not follow from prompt, turn "
            "and load: record anew, on a machine that nobody else uses meanwhile"
        )
    try:
        script_settings(settings)
    except ValueError as error:
        raise ConfigError(f"{where}: what fits its requests is no model of an engine: {error}; record anew") from error


def _check(rows: Rows, where: str) -> None:
    if len(rows) < LEAST_REQUESTS:
        raise ConfigError(
            f"{where} has {len(rows)} requests that ended by themselves, a fit needs {LEAST_REQUESTS} at least: record a "
            "longer run"
        )
    for name, (least, advice) in _LEAST_SPREAD.items():
        low, high = np.quantile(rows.spread[name], [0.05, 0.95])
        if high - low < least:
            raise ConfigError(
                f"{where}: nine of ten requests have {low:.4g} to {high:.4g} {name}, a fit needs a range of {least:g} at "
                f"least to tell what each costs; {advice}"
            )


def _check_columns(features: Floats, where: str) -> None:
    """Relative to one another: what always grows together cannot be told apart."""
    norms = np.linalg.norm(features, axis=0)
    used = [i for i, norm in enumerate(norms) if norm > 0]
    unit = features[:, used] / norms[used]
    alike = np.triu(unit.T @ unit, 1)
    first, second = np.unravel_index(int(alike.argmax()), alike.shape)
    if alike[first, second] > _ALIKE:
        names = " and ".join(COLUMNS[used[int(place)]] for place in (first, second))
        raise ConfigError(
            f"{where}: {names} cannot be told apart, for what they are the times of grows together in all requests; record a "
            "run whose prompts, turns and load vary independently (bench=mixed, several rollout.run_slots)"
        )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _cache_settings(
    run: RunDirectory, config: ProrlConfig, servers: list[list[RequestRecord]]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The prefix cache as the engine's log tells it."""
    if not any(record.cached_tokens for records in servers for record in records):
        return {}, ("no prompt token came from a prefix cache: the model has none",)
    given = config.engine.script
    if given.get("cache_tokens"):
        return {"cache_tokens": given["cache_tokens"], "block_size": given.get("block_size", 32)}, ()
    logs = sorted(run.attempts.glob("*/logs/*-vllm.log"))
    sizes = [
        int(size.replace(",", "")) for log in logs for size in _CACHE_SIZE.findall(log.read_text(errors="replace"))
    ]
    if sizes:
        return {"cache_tokens": sizes[-1], "block_size": config.engine.block_size}, ()
    most = max(sum(record.prompt_tokens for record in records) for records in servers)
    return {"cache_tokens": most, "block_size": config.engine.block_size}, (
        "the engine's log does not tell the size of its prefix cache: the model's holds all that this run asked for; set "
        "cache_tokens to what the engine has",
    )


def _source(run: RunDirectory, config: ProrlConfig, servers: list[ServerRequests]) -> str:
    """``vllm 0.32.0, smollm2-135m, a node of 2 CPUs, engine.threads=2, run NAME``."""
    told = {
        f"{by.engine}, {config.model.name}, a node of {by.cpus} CPUs" for server in servers for by in server.served_by
    }
    tensor = f", engine.tensor_parallel={config.engine.tensor_parallel}" if config.engine.tensor_parallel > 1 else ""
    return f"{' and '.join(sorted(told))}, engine.threads={config.engine.threads}{tensor}, run {run.run_id}"


def latency_file(name: str) -> Path:
    """Where a user's ``latency=NAME`` is found by every launch: the first of their directories of settings. ConfigError for
    a name that ``latency=NAME`` could not say."""
    told = f"{name!r} cannot be the name of a latency model"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise ConfigError(f"{told}: letters, digits, _, - and . alone, 100 at most")
    if read := read_as(f"latency={name}"):
        raise ConfigError(f"{told}: latency={name} is {read}; give another --name, such as --name fit-{name}")
    if name.endswith((".yaml", ".yml")):
        raise ConfigError(f"{told}: it names the file without its ending; give --name {name.rpartition('.')[0]}")
    return own_conf_dir() / "latency" / f"{name}.yaml"


def write_fit(found: LatencyFit, file: Path) -> None:
    """ConfigError if it cannot be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found.yaml())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
