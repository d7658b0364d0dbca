"""What types cannot refuse: numbers and names out of range, told by field."""

from __future__ import annotations

import math
import re

from prorl_hpc.messages.batch import BatchSpec, GroupFilter
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.messages.rollout import Budgets, RolloutSpec, SamplingParams
from prorl_hpc.service.errors import invalid

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
MAX_NAME = 128
MAX_ROLLOUTS_PER_CALL = 10_000
MAX_GROUP_SIZE = 4096


def _require(holds: bool, message: str, field: str) -> None:
    if not holds:
        raise invalid(message, field)


def check_name(name: str, field: str) -> None:
    """Ids become file names and parts of other ids."""
    _require(
        bool(_NAME.match(name)) and len(name) <= MAX_NAME,
        f"{field.removeprefix('$.')} is {name[:MAX_NAME]!r}: expected 1 to {MAX_NAME} letters, digits, '.', '_' or '-', "
        "the first a letter or digit",
        field,
    )


def check_batch(spec: BatchSpec) -> None:
    check_name(spec.batch_id, "$.batch_id")
    smallest = 2 if spec.filter is GroupFilter.INFORMATIVE else 1
    _require(
        smallest <= spec.group_size <= MAX_GROUP_SIZE,
        f"group_size is {spec.group_size}: expected {smallest} to {MAX_GROUP_SIZE} with filter={spec.filter}",
        "$.group_size",
    )
    _require(spec.groups_wanted >= 1, f"groups_wanted is {spec.groups_wanted}: expected 1 or more", "$.groups_wanted")
    _require(
        len(spec.rows) >= spec.groups_wanted,
        f"{len(spec.rows)} rows cannot give groups_wanted={spec.groups_wanted} groups: one row makes one group",
        "$.rows",
    )
    parallel = spec.max_parallel_groups
    _require(parallel >= 0, f"max_parallel_groups is {parallel}: expected 0 or more", "$.max_parallel_groups")
    usable = spec.min_usable_samples
    _require(usable >= 1, f"min_usable_samples is {usable}: expected 1 or more", "$.min_usable_samples")
    _check_common(spec, "$")


def check_rollouts(specs: list[RolloutSpec]) -> None:
    _require(
        1 <= len(specs) <= MAX_ROLLOUTS_PER_CALL,
        f"{len(specs)} rollouts in one call: expected 1 to {MAX_ROLLOUTS_PER_CALL}",
        "$",
    )
    seen: set[str] = set()
    for i, spec in enumerate(specs):
        check_name(spec.rollout_id, f"$[{i}].rollout_id")
        _require(spec.rollout_id not in seen, f"rollout_id {spec.rollout_id!r} comes twice", f"$[{i}].rollout_id")
        seen.add(spec.rollout_id)
        _check_common(spec, f"$[{i}]")


def check_weights(update: WeightUpdate) -> None:
    _require(update.version >= 1, f"version is {update.version}: expected 1 or more", "$.version")
    _require(bool(update.paths), "paths is empty: expected safetensors files", "$.paths")
    probe = update.probe
    if probe is not None:
        n, got = len(probe.token_ids), len(probe.logprobs)
        _require(n >= 2 and got == n - 1, f"{n} token_ids need {n - 1} logprobs, got {got}", "$.probe.logprobs")
        _require(probe.tolerance > 0, f"tolerance is {probe.tolerance}: expected more than 0", "$.probe.tolerance")


def _check_common(spec: BatchSpec | RolloutSpec, at: str) -> None:
    _require(bool(spec.task), "task is empty", f"{at}.task")
    _require(bool(spec.policy), "policy is empty", f"{at}.policy")
    _require(0 <= spec.priority <= 100, f"priority is {spec.priority}: expected 0 to 100", f"{at}.priority")
    _check_sampling(spec.sampling, f"{at}.sampling")
    _check_budgets(spec.budgets, f"{at}.budgets")


def _check_sampling(sampling: SamplingParams, at: str) -> None:
    temperature = sampling.temperature
    _require(0 <= temperature < math.inf, f"temperature is {temperature}: expected 0 or more", f"{at}.temperature")
    _require(0 < sampling.top_p <= 1, f"top_p is {sampling.top_p}: expected more than 0, up to 1", f"{at}.top_p")
    _require(sampling.max_tokens >= 1, f"max_tokens is {sampling.max_tokens}: expected 1 or more", f"{at}.max_tokens")


def _check_budgets(budgets: Budgets, at: str) -> None:
    for name in budgets.__struct_fields__:
        seconds = getattr(budgets, name)
        _require(0 < seconds < math.inf, f"{name} is {seconds}: expected more than 0", f"{at}.{name}")
