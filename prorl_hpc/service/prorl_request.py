"""What ProRL Agent's clients send, and what it means here."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Collection
from typing import Any

import msgspec

from prorl_hpc.messages.inference import OutsideServer
from prorl_hpc.messages.rollout import RolloutSpec, SamplingParams
from prorl_hpc.service.errors import Refusal, invalid
from prorl_hpc.service.limits import check_rollouts, check_server

CLIENT = "prorl-agent"
_JOB = "job-"
_HASHED_JOB = "hashed-job-"
_SERVER = "prorl-"
_PLAIN_JOB = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_DEFAULT_SOURCE = "swebench"
ALIASES = {
    "codecontests": "deepcoder",
    "apps": "deepcoder",
    "codeforces": "deepcoder",
    "taco": "deepcoder",
    "math": "deepscaler",
}
"""Other names of data sources."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "n": (1, None),
}


class ProcessSampling(msgspec.Struct, frozen=True):
    """The first five are used. The next are of that server's own agent: any value is taken and does nothing, since the
    run's configuration decides here. The last would change what is sampled: only the values that change
    nothing are taken."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] = []

    max_iterations: Any = None
    token_level_generation: Any = None
    custom_tokenizer: Any = None
    max_model_len: Any = None
    ensure_thinking_end_properly: Any = None
    strict_loop_detector: Any = None
    logprobs: Any = None

    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    n: Any = None


class ProcessBody(msgspec.Struct, frozen=True):
    """``job_id``: any string; the same again is answered with the same result. Absent: a new job."""

    instance: dict[str, Any]
    sampling_params: ProcessSampling = ProcessSampling()
    job_id: str | int | None = None


class CancelBody(msgspec.Struct, frozen=True):
    job_id: str | int


class AddressBody(msgspec.Struct, frozen=True):
    address: str


def rollout_id_of(job_id: str | int) -> str:
    """Ours for any name that a client may choose, one to one."""
    text = str(job_id)
    if _PLAIN_JOB.match(text):
        return _JOB + text
    return _HASHED_JOB + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def is_job(rollout_id: str) -> bool:
    return rollout_id.startswith((_JOB, _HASHED_JOB))


def rollout_of(body: ProcessBody, tasks: Collection[str], own_task: str) -> RolloutSpec:
    """``own_task``: what a job without a data source means, where the run does not serve theirs. Raises Refusal 400."""
    job_id = uuid.uuid4().hex if body.job_id is None else body.job_id
    spec = RolloutSpec(
        rollout_id=rollout_id_of(job_id),
        task=_task(body.instance.get("data_source"), tasks, own_task),
        row=body.instance,
        sampling=_sampling(body.sampling_params),
        client=CLIENT,
    )
    try:
        check_rollouts([spec])
    except Refusal as refusal:
        field = str(refusal.details.get("field", "$")).replace("$[0].row", "$.instance")
        raise invalid(str(refusal), field.replace("$[0].sampling", "$.sampling_params")) from refusal
    return spec


def server_of(address: str) -> OutsideServer:
    """Raises Refusal 400."""
    url = address.rstrip("/")
    server_id = _SERVER + hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:16]
    server = OutsideServer(server_id, url)
    try:
        check_server(server)
    except Refusal as refusal:
        raise invalid(f"address is {address[:256]!r}: expected http(s)://host:port/v1", "$.address") from refusal
    return server


def was_added_here(server_id: str, url: str) -> bool:
    """Whether /add_llm_server registered it."""
    return bool(url) and server_id.startswith(_SERVER) and server_of(url).server_id == server_id


def _task(source: Any, tasks: Collection[str], own_task: str) -> str:
    if source is None:
        source = _DEFAULT_SOURCE if _DEFAULT_SOURCE in tasks else own_task
    for name in (source, ALIASES.get(source) if isinstance(source, str) else None):
        if isinstance(name, str) and name in tasks:
            return name
    names = ", ".join(sorted(tasks)) or "none"
    raise Refusal(
        f"data_source is {str(source)[:128]!r}: this run serves {names}",
        code="unknown_data_source",
        status=400,
        details={"field": "$.instance.data_source", "known": sorted(tasks)},
    )


def _sampling(given: ProcessSampling) -> SamplingParams:
    for name, values in _NEUTRAL.items():
        if getattr(given, name) not in values:
            message = f"{name} would change what is sampled and is not supported: leave it out"
            raise invalid(message, f"$.sampling_params.{name}")
    most = SamplingParams().max_tokens if given.max_tokens is None else given.max_tokens
    return SamplingParams(given.temperature, given.top_p, most, given.seed, given.stop_token_ids)
