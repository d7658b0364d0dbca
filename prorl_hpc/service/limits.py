"""What types cannot refuse: numbers and names out of range, told by field.

``BOUNDS`` are JSON Schema keywords; the checks here and the OpenAPI document are made from the same ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec

from prorl_hpc.core.policy_choice import ANY
from prorl_hpc.messages.batch import BatchSpec, GroupFilter
from prorl_hpc.messages.inference import OutsideServer, WeightUpdate
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.service.errors import Refusal, invalid

MAX_NAME = 128
MAX_ROLLOUTS_PER_CALL = 10_000
MAX_GROUP_SIZE = 4096
MAX_ROW_BYTES = 64 << 20
"""In msgpack. A message to a worker has one row, and may be four times as long."""
_MAX_COUNT = 1_000_000
_MAX_SECONDS = 1e9
_MAX_VERSION = 2**31 - 1
_MAX_TOKEN_ID = 2**31 - 1

_NAME = {"minLength": 1, "maxLength": MAX_NAME, "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"}
"""Ids become file names and parts of other ids."""
_WORD = {"minLength": 1, "maxLength": MAX_NAME}
_SECONDS = {"exclusiveMinimum": 0, "maximum": _MAX_SECONDS}
_TOKEN_IDS = {"items": {"minimum": 0, "maximum": _MAX_TOKEN_ID}}
_COMMON: dict[str, dict[str, Any]] = {
    "task": _WORD,
    "policy": _WORD,
    "client": {"maxLength": MAX_NAME},
    "priority": {"minimum": 0, "maximum": 100},
}
BOUNDS: dict[str, dict[str, dict[str, Any]]] = {
    "BatchSpec": {
        **_COMMON,
        "batch_id": _NAME,
        "rows": {"minItems": 1, "maxItems": _MAX_COUNT},
        "groups_wanted": {"minimum": 1, "maximum": _MAX_COUNT},
        "group_size": {"minimum": 1, "maximum": MAX_GROUP_SIZE},
        "max_parallel_groups": {"minimum": 0, "maximum": _MAX_COUNT},
        "min_usable_samples": {"minimum": 1, "maximum": MAX_GROUP_SIZE},
    },
    "RolloutSpec": {
        **_COMMON,
        "rollout_id": _NAME,
        "group_id": {"maxLength": 2 * MAX_NAME},
        "sample": {"minimum": 0, "maximum": _MAX_COUNT},
    },
    "SamplingParams": {
        "temperature": {"minimum": 0, "maximum": 1e6},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "max_tokens": {"minimum": 1, "maximum": _MAX_TOKEN_ID},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "stop_token_ids": {**_TOKEN_IDS, "maxItems": 1024},
    },
    "Budgets": dict.fromkeys(("init_s", "run_s", "eval_s", "total_s", "wall_s"), _SECONDS),
    "WeightUpdate": {
        "policy": _WORD,
        "version": {"minimum": 1, "maximum": _MAX_VERSION},
        "paths": {"maxItems": 10_000, "items": {"minLength": 1, "maxLength": 4096}},
    },
    "WeightSource": {
        "host": {"minLength": 1, "maxLength": 255, "pattern": "^[A-Za-z0-9.:_-]+$"},
        "port": {"minimum": 1, "maximum": 65535},
        "word": {"minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9_-]+$"},
    },
    "WeightProbe": {
        "token_ids": {**_TOKEN_IDS, "minItems": 2, "maxItems": _MAX_COUNT},
        "tolerance": {"exclusiveMinimum": 0},
    },
    "OutsideServer": {
        "server_id": _NAME,
        "url": {
            "maxLength": 2048,
            "pattern": r"^(https?://[A-Za-z0-9._\[\]:-]+(/[!-~]*)?|unix:/[!-~]+)$",
        },
        "model": {"maxLength": 512},
        "policy": _WORD,
        "weight_version": {"minimum": 0, "maximum": _MAX_VERSION},
        "api_key": {"maxLength": 4096, "pattern": "^[!-~]*$"},
    },
}
_EXPECTED = {
    _NAME["pattern"]: f"1 to {MAX_NAME} letters, digits, '.', '_' or '-', the first a letter or digit",
    BOUNDS["WeightSource"]["host"]["pattern"]: "the address of a node",
    BOUNDS["WeightSource"]["word"]["pattern"]: "letters, digits, '_' or '-'",
    BOUNDS["OutsideServer"]["url"]["pattern"]: "http(s)://host:port/v1 or unix:/path",
    BOUNDS["OutsideServer"]["api_key"]["pattern"]: "printable ASCII without spaces",
}
_SECRET = {"api_key"}


def check_batch(spec: BatchSpec) -> None:
    _check(spec, "$")
    if spec.filter is GroupFilter.INFORMATIVE and spec.group_size < 2:
        message = f"group_size is {spec.group_size}: expected 2 to {MAX_GROUP_SIZE} with filter={spec.filter}"
        raise invalid(message, "$.group_size")
    if len(spec.rows) < spec.groups_wanted:
        message = (
            f"{len(spec.rows)} rows cannot give groups_wanted={spec.groups_wanted} groups: one row makes one group"
        )
        raise invalid(message, "$.rows")
    _check_rows(spec.rows, "$.rows")


def check_rollouts(specs: list[RolloutSpec]) -> None:
    if not 1 <= len(specs) <= MAX_ROLLOUTS_PER_CALL:
        raise invalid(f"{len(specs)} rollouts in one call: expected 1 to {MAX_ROLLOUTS_PER_CALL}", "$")
    seen: set[str] = set()
    for i, spec in enumerate(specs):
        _check(spec, f"$[{i}]")
        if spec.rollout_id in seen:
            raise invalid(f"rollout_id {spec.rollout_id!r} comes twice", f"$[{i}].rollout_id")
        seen.add(spec.rollout_id)
        _check_rows([spec.row], f"$[{i}].row")


def check_task(task: str, known: Collection[str], field: str) -> None:
    if task not in known:
        names = ", ".join(sorted(known)) or "none"
        raise Refusal(
            f"this run serves no task {task!r}; it serves: {names}",
            code="unknown_task",
            status=400,
            details={"field": field, "known": sorted(known)},
        )


def check_policy(policy: str, known: Collection[str], field: str, *, or_any: bool = False, status: int = 400) -> None:
    """``or_any``: an order may leave it to the weights of the run's configuration."""
    if policy not in known and not (or_any and policy == ANY):
        names = ", ".join(known) + (f"; {ANY} for one by rollout.policy_weights" if or_any else "")
        raise Refusal(
            f"this run has no policy {policy!r}; it has: {names}",
            code="unknown_policy",
            status=status,
            details={"field": field, "known": sorted(known)},
        )


def check_weights(update: WeightUpdate) -> None:
    _check(update, "$")
    if bool(update.paths) is (update.source is not None):
        given = "both" if update.paths else "neither"
        raise invalid(f"{given} of paths and source: expected the one or the other", "$.paths")
    probe = update.probe
    if probe is not None and len(probe.logprobs) != len(probe.token_ids) - 1:
        n, got = len(probe.token_ids), len(probe.logprobs)
        raise invalid(f"{n} token_ids need {n - 1} logprobs, got {got}", "$.probe.logprobs")


def check_server(server: OutsideServer, field: str = "$") -> None:
    if "#" in server.url:  # as engine.outside has it
        raise invalid("url has a '#': expected without, and the name of the model in the field model", f"{field}.url")
    _check(server, field)
    try:
        url = urlsplit(server.url)
        good = url.scheme == "unix" or bool(url.hostname and (url.port is None or url.port > 0))
    except ValueError:
        good = False  # brackets or a port that are none
    if not good or "?" in server.url:
        raise invalid(f"url is {server.url!r}: expected http(s)://host:port/v1 or unix:/path", f"{field}.url")


def _check(value: msgspec.Struct, at: str) -> None:
    """All fields of ``value`` and of the structs in it against BOUNDS."""
    if _well_within(value):
        return
    bounds = BOUNDS.get(type(value).__name__, {})
    for name in value.__struct_fields__:
        inner, field = getattr(value, name), f"{at}.{name}"
        if isinstance(inner, msgspec.Struct):
            _check(inner, field)
        elif inner is not None and name in bounds:
            _check_value(inner, bounds[name], field)


def _well_within(value: msgspec.Struct) -> bool:
    """What ``_check`` refuses is not; without telling where, which most orders need not know."""
    for name, fits in _tests(type(value)):
        inner = getattr(value, name)
        if inner is not None and not fits(inner):
            return False
    return True


@lru_cache
def _tests(struct: type[msgspec.Struct]) -> list[tuple[str, Callable[[Any], bool]]]:
    """The fields of ``struct`` that have bounds, or are structs."""
    bounds = BOUNDS.get(struct.__name__, {})
    tests: list[tuple[str, Callable[[Any], bool]]] = [(name, _test(bound)) for name, bound in bounds.items()]
    nested = [name for name in struct.__struct_fields__ if name not in bounds]
    return tests + [
        (name, lambda inner: not isinstance(inner, msgspec.Struct) or _well_within(inner)) for name in nested
    ]


def _test(bound: dict[str, Any]) -> Callable[[Any], bool]:
    """Whether a value is within the keywords of ``bound``."""
    low = bound.get("minimum", bound.get("minLength", bound.get("minItems", -math.inf)))
    high = bound.get("maximum", bound.get("maxLength", bound.get("maxItems", math.inf)))
    above = bound.get("exclusiveMinimum", -math.inf)
    pattern = re.compile(bound["pattern"].removesuffix("$") + r"\Z") if "pattern" in bound else None
    of_items = _test(bound["items"]) if "items" in bound else None

    def fits(value: Any) -> bool:
        size = value if isinstance(value, int | float) else len(value)
        return (
            low <= size <= high
            and size > above
            and (pattern is None or pattern.match(value) is not None)
            and (of_items is None or all(map(of_items, value)))
        )

    return fits


def _check_value(value: Any, bound: dict[str, Any], field: str) -> None:
    """``value`` within the keywords of ``bound``."""
    name = field.rpartition(".")[2]
    if not _test({keyword: limit for keyword, limit in bound.items() if keyword != "items"})(value):
        raise invalid(f"{_told(name, value)}: expected {_expected(bound)}", field)
    for i, item in enumerate(value if "items" in bound else ()):
        _check_value(item, bound["items"], f"{field}[{i}]")


def _told(name: str, value: Any) -> str:
    if name in _SECRET:
        return f"{name} is not what it may be"
    if isinstance(value, list):
        return f"{name} has {len(value)} entries"
    return f"{name} is {value[:MAX_NAME]!r}" if isinstance(value, str) else f"{name} is {value}"


def _expected(bound: dict[str, Any]) -> str:
    low = bound.get("minimum", bound.get("minLength", bound.get("minItems")))
    high = bound.get("maximum", bound.get("maxLength", bound.get("maxItems")))
    if "pattern" in bound:
        return _EXPECTED[bound["pattern"]]
    unit = " characters" if "maxLength" in bound or "minLength" in bound else ""
    if "exclusiveMinimum" in bound:
        return f"more than {bound['exclusiveMinimum']}" + ("" if high is None else f", up to {high:g}")
    if low is None:
        return f"at most {high}{unit}"
    return f"{low} or more{unit}" if high is None else f"{low} to {high}{unit}"


def _check_rows(rows: list[dict[str, Any]], field: str) -> None:
    """Rows travel as msgpack, which has no integers beyond 64 bits, and each in one message."""
    for row in rows:
        try:
            size = len(msgspec.msgpack.encode(row))
        except (OverflowError, RecursionError) as error:
            raise invalid(f"a row cannot be sent to a worker: {error}", field) from error
        if size > MAX_ROW_BYTES:
            raise invalid(f"a row takes {size} bytes in msgpack: expected at most {MAX_ROW_BYTES}", field)
