"""What types cannot refuse: ranges, and settings that do not go together.

``validate`` finds everything at once and touches nothing outside the configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorl_hpc.config.agent_validation import agent_errors
from prorl_hpc.config.cluster_validation import cluster_errors
from prorl_hpc.config.finish_validation import finish_errors
from prorl_hpc.config.parallel import parallel_errors
from prorl_hpc.config.policies import model_setting, models_of
from prorl_hpc.config.policy_validation import policy_errors
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.config.script_settings import script_errors
from prorl_hpc.config.setting_rules import (
    AT_LEAST_1,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Check,
    did_you_mean,
    one_of,
    words_of,
)
from prorl_hpc.config.size_validation import size_errors
from prorl_hpc.config.text_validation import text_errors
from prorl_hpc.config.tool_validation import tool_errors
from prorl_hpc.config.trainer_validation import TRAINER_RULES, trainer_errors

_KERNEL_PROCESSES = 16

_RULES: list[tuple[Check, str]] = [
    (POSITIVE, "run.start_timeout_s run.stop_timeout_s engine.start_timeout_s engine.outside_turn_s"),
    (POSITIVE, "sandbox.start_timeout_s sandbox.tmux_poll_s"),
    (POSITIVE, "task.call_timeout_s rollout.init_s rollout.run_s rollout.eval_s rollout.total_s rollout.wall_s"),
    (POSITIVE, "rollout.heartbeat_s rollout.lost_after_s"),
    (AT_LEAST_1, "model.max_context_tokens engine.servers_per_node engine.tensor_parallel engine.threads"),
    (AT_LEAST_1, "engine.block_size engine.kv_cache_mib engine.max_parallel_requests sandbox.start_limit"),
    (AT_LEAST_1, "sandbox.output_limit_bytes task.max_turns"),
    (AT_LEAST_1, "task.max_turn_tokens task.observation_limit_chars rollout.init_slots"),
    (AT_LEAST_1, "rollout.run_slots rollout.eval_slots rollout.workers_per_node"),
    (AT_LEAST_1, "cluster.time_minutes cluster.requeue_without_progress"),
    (NOT_NEGATIVE, "cluster.rollout.nodes cluster.inference.nodes cluster.trainer.nodes run.drain_s"),
    (NOT_NEGATIVE, "run.min_free_disk_gib run.min_free_memory_gib run.restarts engine.restarts sandbox.start_retries"),
    (NOT_NEGATIVE, "rollout.drain_s"),
    (NOT_NEGATIVE, "sandbox.warm sandbox.max_disk_mib sandbox.max_file_mib sandbox.max_cpus"),
    (NOT_NEGATIVE, "rollout.retries rollout.ready_slots"),
    (NOT_NEGATIVE, "cluster.rollout.cpus cluster.inference.cpus cluster.trainer.cpus"),
    (NOT_NEGATIVE, "cluster.rollout.gpus cluster.inference.gpus cluster.trainer.gpus cluster.rollout.memory_gib"),
    (NOT_NEGATIVE, "cluster.inference.memory_gib cluster.trainer.memory_gib task.train.size task.heldout.size"),
    (FRACTION, "engine.gpu_memory_utilization"),
    ((lambda v: v >= 8, "8 or more, or no shell starts"), "sandbox.max_processes"),
    ((lambda v: v == 0 or v >= 64, "0 (no limit), or 64 or more"), "sandbox.max_memory_mib"),
    ((lambda v: v == 0 or 1024 <= v < 65536, "0, or 1024 to 65535"), "rollout.http_port"),
    ((lambda v: 0 < v <= 65535, "greater than 0 and at most 65535"), "cluster.signal_lead_s"),
    (one_of("auto", "on", "off"), "model.thinking"),
    (one_of("local", "slurm"), "cluster.kind"),
    (one_of("gpus-per-node", "gres"), "cluster.gpu_option"),
    (one_of("auto", "vllm", "transformers", "scripted"), "engine.kind"),
    (one_of("auto", "apptainer", "local"), "sandbox.kind"),
    (one_of("none", "host"), "sandbox.network"),
    (one_of("workspace", "image"), "sandbox.writable"),
    (one_of("auto", "always", "never"), "sandbox.copy_images"),
    (one_of("inprocess", "kernel"), "sandbox.ipython"),
    (one_of("own", "tmux"), "sandbox.shell"),
    (one_of("auto", "float32", "bfloat16", "float16"), "engine.dtype"),
    (one_of("least_in_flight", "round_robin", "round_robin_per_request"), "rollout.balancing"),
    (one_of("move", "retry"), "rollout.when_server_lost"),
    *TRAINER_RULES,
]


def validate(config: ProrlConfig) -> list[str]:
    """Everything that is wrong, each as one sentence that names the setting, what was given and what is allowed."""
    return [
        *_ranges(config),
        *size_errors(config),
        *text_errors(config),
        *_names(config),
        *trainer_errors(config),
        *_clocks(config),
        *_sandbox(config),
        *_tokens(config),
        *policy_errors(config),
        *parallel_errors(config),
        *script_errors(config),
        *agent_errors(config),
        *tool_errors(config),
        *finish_errors(config),
        *cluster_errors(config),
    ]


def allowed_words(name: str) -> list[str]:
    """The words that may be the value of setting ``name``; empty where it is not one of a few."""
    return [word for (_, text), names in _RULES if name in names.split() for word in words_of(text)]


def setting(config: ProrlConfig, dotted: str) -> Any:
    """The value at ``trainer.steps`` or the like."""
    value: Any = config
    for name in dotted.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def _ranges(config: ProrlConfig) -> Iterator[str]:
    for (allowed, text), names in _RULES:
        for name in (place for word in names.split() for place in _places(config, word)):
            value = setting(config, name)
            finite = not isinstance(value, float) or math.isfinite(value)
            if not finite or not allowed(value):
                words = words_of(text)
                quoted = (
                    " (in a file within quotes: YAML takes on and off for true and false)" if "off" in words else ""
                )
                number = "" if finite else "finite, and "
                yield f"{name}={value}: must be {number}{text}{quoted}{did_you_mean(value, words)}"


def _places(config: ProrlConfig, name: str) -> list[str]:
    """Settings of ``model`` are those of every policy's model."""
    others = [f"policies.{policy}.{name}" for policy in config.policies] if name.startswith("model.") else []
    return [name, *others]


def _names(config: ProrlConfig) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", config.run.name):
        yield f"run.name={config.run.name!r}: must be 1 to 40 letters, digits, or . _ - (it names a directory)"
    yield from _run_root(config.run.root)
    runtime = config.run.runtime_root
    if not runtime.startswith(("/", "$")):
        yield (
            f"run.runtime_root={runtime}: must be absolute, for every node looks for it: a directory such as /tmp, or a "
            "variable such as $SLURM_TMPDIR"
        )
    for name in config.engine.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"engine.env: {name!r} must be the name of an environment variable: letters, digits and _"
    if not config.model.path and not config.model.prepare:
        yield "model.path is empty and model.prepare too: give a model directory (model=path model.path=/models/…)"


def _run_root(root: str) -> Iterator[str]:
    """It is written into the job's script, where ``%j`` and the like mean something else, and a backslash is lost."""
    whole = str(Path(root).expanduser().absolute())
    if wrong := sorted({character for character in whole if character in "%\\" or not character.isprintable()}):
        told = ", ".join(map(repr, wrong))
        where = "" if whole == root else f" (that is {whole!r})"
        yield f"run.root={root!r}{where}: must be a path without %, backslashes and control characters; it has {told}"


def _sandbox(config: ProrlConfig) -> Iterator[str]:
    given = config.sandbox
    if given.ipython == "kernel" and 8 <= given.max_processes < _KERNEL_PROCESSES:
        yield (
            f"sandbox.max_processes={given.max_processes} is too few for sandbox.ipython=kernel, whose threads count: "
            f"{_KERNEL_PROCESSES} or more, or sandbox.ipython=inprocess"
        )


def _clocks(config: ProrlConfig) -> Iterator[str]:
    clocks = config.rollout
    if clocks.total_s < max(clocks.init_s, clocks.run_s, clocks.eval_s):
        yield f"rollout.total_s={clocks.total_s:g} is less than one stage's budget (init_s, run_s, eval_s)"
    if clocks.wall_s < clocks.total_s:
        yield f"rollout.wall_s={clocks.wall_s:g} is less than rollout.total_s={clocks.total_s:g}"
    if clocks.drain_s >= config.run.stop_timeout_s:
        yield (
            f"rollout.drain_s={clocks.drain_s:g} must be less than run.stop_timeout_s={config.run.stop_timeout_s:g}, "
            "or workers that are told to stop are killed while their stages go on"
        )
    if clocks.lost_after_s < 2 * clocks.heartbeat_s:
        yield (
            f"rollout.lost_after_s={clocks.lost_after_s:g} must be at least twice rollout.heartbeat_s="
            f"{clocks.heartbeat_s:g}, or live nodes are taken as lost"
        )


def _tokens(config: ProrlConfig) -> Iterator[str]:
    for policy, model in models_of(config).items():
        if config.task.max_turn_tokens >= model.max_context_tokens:
            yield (
                f"task.max_turn_tokens={config.task.max_turn_tokens} leaves no room for a prompt in "
                f"{model_setting(policy)}.max_context_tokens={model.max_context_tokens}"
            )
