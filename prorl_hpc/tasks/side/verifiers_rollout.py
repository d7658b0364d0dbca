"""Calls to an environment of the package ``verifiers``, in a process and a Python of its own (see host).

Both of the package's forms are known: a module with ``load_environment`` (versions before 0.4), and a module that exports
a Taskset (``verifiers.v1``). The environment drives its rollout itself; its client talks to the LLM gateway's Unix socket,
through a port on loopback that lives as long as this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

_KEY = "PRORL_GATEWAY_API_KEY"
"""The variable that holds the session's key; programs that verifiers starts do not inherit names with API_KEY."""

_MOST_TASKS = 100_000
"""A taskset may be without end."""


_FAULTS_OF_THE_POLICY = ("EmptyModelResponseError", "InvalidModelResponseError", "ToolParseError")
"""Errors of verifiers that end a rollout for what the policy wrote; as the environment scores it."""


class Refused(Exception):
    """Why this environment cannot be used; in words for a person."""


_environment: Any = None
_classic = False


def prepare(env: str, kwargs: dict[str, Any]) -> None:
    """Load the environment, before the rollouts' processes are forked."""
    global _environment, _classic
    module = _module(env)
    _classic = callable(getattr(module, "load_environment", None))
    _environment = _load_classic(env, kwargs) if _classic else _load_v1(env, kwargs)


def rows(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """``size`` inputs of ``split`` (train or heldout), shuffled by ``seed``; fewer if there are no more."""
    return (_classic_rows if _classic else _v1_rows)(split, size, seed)


async def rollout(input: dict[str, Any], socket: str, key: str, model: str, scratch: str) -> dict[str, Any]:
    """One rollout, scored: {"reward", "metrics", "error", "malformed"}. ``scratch``: a directory for what it writes."""
    os.environ[_KEY] = key
    async with _door(socket) as url:
        if _classic:
            return await _classic_rollout(input, url, model)
        return await _v1_rollout(input, url, model, Path(scratch))


def _module(env: str) -> ModuleType:
    try:
        import verifiers  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refused(
            f"the package verifiers is not in {sys.executable} ({error}): install it there, or name the interpreter that has "
            "it in task.options.python"
        ) from error
    name = env.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    for candidate in (f"verifiers.v1.tasksets.{name}", name):
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name is None or not (candidate == error.name or candidate.startswith(f"{error.name}.")):
                raise Refused(f"the environment {env} needs a module that {sys.executable} lacks: {error}") from error
    raise Refused(
        f"there is no module {name} in {sys.executable}: install the environment's package there, or put its directory on "
        "PYTHONPATH"
    )


@contextlib.asynccontextmanager
async def _door(socket: str) -> AsyncIterator[str]:
    """http://127.0.0.1:PORT/v1, which leads to the gateway's socket. Who comes without the session's key is refused there."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(65536):
                sink.write(chunk)
                await sink.drain()
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(socket)
        try:
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        finally:
            for end in (inner_writer, writer):
                end.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


# before 0.4: load_environment


def _load_classic(env: str, kwargs: dict[str, Any]) -> Any:
    import verifiers

    try:
        load = verifiers.load_environment
    except AttributeError as error:
        raise Refused(
            f"{env} has load_environment, which verifiers {verifiers.__version__} in {sys.executable} has no more: install "
            "verifiers<0.4 there, or port the environment to a Taskset"
        ) from error
    environment = load(env, **kwargs)
    if getattr(environment, "requires_group_rollouts", False):
        raise Refused(f"{env} scores the rollouts of a prompt together, and here each is scored alone")
    return environment


def _classic_rows(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    environment = _environment
    if split == "heldout" and environment.eval_dataset is None and environment.eval_dataset_source is None:
        raise Refused("it has no eval_dataset: write held-out rows to a JSONL file and name it in task.heldout.path")
    dataset = environment.get_dataset(size, seed) if split == "train" else environment.get_eval_dataset(size, seed)
    return [json.loads(json.dumps(dict(row), default=str)) for row in dataset]


async def _classic_rollout(input: dict[str, Any], url: str, model: str) -> dict[str, Any]:
    from verifiers.types import ClientConfig

    client = ClientConfig(api_key_var=_KEY, api_base_url=url, max_retries=0)
    output = await _environment.run_rollout(input, client, model, {})
    return {
        "reward": _number(output["reward"]),
        "metrics": _numbers(output.get("metrics") or {}),
        "error": "" if _is_the_policys(output.get("error")) else _error(output.get("error")),
        "malformed": _is_the_policys(output.get("error")),
    }


# verifiers.v1


def _load_v1(env: str, kwargs: dict[str, Any]) -> Any:
    """An Env of the taskset ``env``; ``kwargs`` is what a verifiers TOML has under [env]."""
    from verifiers.v1.utils import loaders

    config = {**kwargs, "taskset": {**kwargs.get("taskset", {}), "id": env}}
    kind = loaders.env_config_type(env, config.get("id") or "")
    for name, field in kind.model_fields.items():
        # Not a provider's sandboxes and not a coding agent's program, unless asked for.
        if type(field.default).__name__.endswith("AgentConfig"):
            seat = {"runtime": {"type": "subprocess"}, **config.get(name, {})}
            if "harness" not in seat and loaders.default_harness_id(env) == "bash":
                seat["harness"] = {"id": "null"}
            config[name] = seat
    return loaders.load_environment(kind.model_validate(config))


def _v1_rows(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """A taskset has no held-out part: one task in four is, by its content."""
    found: list[dict[str, Any]] = []
    for task in itertools.islice(_environment.taskset, _MOST_TASKS):
        data = task.data.model_dump(mode="json", exclude_none=True)
        content = json.dumps({name: value for name, value in data.items() if name != "idx"}, sort_keys=True)
        if (hashlib.sha256(content.encode()).digest()[0] % 4 == 0) == (split == "heldout"):
            found.append(data)
    random.Random(seed).shuffle(found)
    return found[:size]


async def _v1_rollout(input: dict[str, Any], url: str, model: str, scratch: Path) -> dict[str, Any]:
    import verifiers.v1 as vf

    _run_scripts_here(scratch)
    environment = _environment
    task_type = type(environment.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(input), environment.config.taskset.task)
    context = vf.ModelContext(model=model, client=vf.EvalClientConfig(base_url=url, api_key_var=_KEY))
    async with environment.serving():
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, context)
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) > 1:
        raise Refused(
            f"its episodes have {len(traces)} trained agents, each with a reward of its own; here there is one"
        )
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    trace = traces[0] if traces else None
    return {
        "reward": 0.0 if trace is None else _number(trace.reward),
        "metrics": {} if trace is None else _numbers(trace.metrics),
        "malformed": False,
        "error": "; ".join(f"{error.type}: {error.message}" for error in errors),
    }


def _run_scripts_here(scratch: Path) -> None:
    """The chat programs of verifiers need what verifiers itself depends on: this interpreter runs them, where uv would
    fetch the same packages once more on a node that may have no network. What they write goes to ``scratch``."""
    from verifiers.v1.runtimes import subprocess as local

    async def prepare(self: Any, script: str | bytes, env: Any = None, *, activate: bool = True) -> list[str]:
        path = scratch / "program.py"
        path.write_bytes(script.encode() if isinstance(script, str) else script)
        return [sys.executable, str(path)]

    local.SubprocessRuntime.prepare_uv_script = prepare
    local.CACHE_DIR = scratch


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise Refused(f"it scored the rollout {number}: expected a finite number")
    return number


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    given = {str(name): value for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in given.items() if math.isfinite(value)}


def _is_the_policys(error: Any) -> bool:
    return isinstance(error, dict) and error.get("error") in _FAULTS_OF_THE_POLICY


def _error(error: Any) -> str:
    """In words; empty if there was none."""
    if not error:
        return ""
    if isinstance(error, dict):
        chain = error.get("error_chain_str") or error.get("error_chain_repr") or error.get("message")
        return str(chain or error)
    return str(error)
