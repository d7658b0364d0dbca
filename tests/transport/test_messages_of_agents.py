"""What an agent of the run may say: what contradicts itself, or what no later step could take, does not decode."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorl_hpc.messages.codec import Decoder
from prorl_hpc.messages.control import AgentToCoordinator, WorkerHello
from prorl_hpc.messages.errors import TransportError
from prorl_hpc.messages.trajectory import Trajectory

Fields = dict[str, Any]
DEEP = b"\x91" * 100_000 + b"\xc0"


def report(stage: str, kind: str = "", **fields: Any) -> Fields:
    failure = {"failure": {"stage": stage, "kind": kind, "message": "it broke"}} if kind else {}
    return {"type": "StageFinished", "worker_id": "w0", "rollout_id": "a", "stage": stage, **failure, **fields}


def hello(*held: Fields, **fields: Any) -> Fields:
    pools: Fields = {}
    return {
        "type": "WorkerHello",
        "worker_id": "w0",
        "node": "n",
        "pools": pools,
        "sandbox": "s",
        "held": held,
        **fields,
    }


def held(rollout_id: str = "a", *reports: Fields, running: str | None = None) -> Fields:
    return {"rollout_id": rollout_id, "reports": reports, "running": running}


def decoded(message: Fields) -> Any:
    return Decoder[Any](AgentToCoordinator).decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        *(hello(held(name, running="run")) for name in ("", "a#", "#2", "a#-1", "a#0", "a#1", "a#02", "a#2#3", "a#²")),
        hello(held("a#" + "9" * 30, running="run")),
        hello(held("a#" + "9" * 5000, running="run")),
        hello(held("a", report("init", "sandbox"), report("run"))),
        hello(held("a", report("init", "policy"), running="run")),
        hello(held("a", report("eval"), report("init"))),
        hello(held("a", report("init"), report("init"))),
        hello(held("a", report("run"), running="run")),
        hello(held("a", report("init", rollout_id="b"))),
        hello(held("a", report("init", worker_id="w1"))),
        hello(held("a", running="init"), held("a", running="run")),
        *(hello(worker_id=name) for name in ("", "a b", "a\n", "/", "x" * 129)),
        *(hello(pools={"run": size}) for size in (-1, 10**9)),
        *(report("eval", reward=number) for number in (float("nan"), float("inf"), float("-inf"))),
        *(report("run", busy_s=number) for number in (-1.0, float("nan"), float("inf"))),
        report("eval", metrics={"turns": float("nan")}),
    ],
)
def test_what_is_refused(message: Fields) -> None:
    with pytest.raises(TransportError, match="does not decode"):
        decoded(message)


def test_a_message_that_is_nested_too_deeply() -> None:
    with pytest.raises(TransportError, match="does not decode"):
        Decoder[Any](AgentToCoordinator).decode(b"\x83\xa4type\xa7Goodbye\xa8agent_id\xa1x\xa1q" + DEEP)


def test_what_a_worker_may_hold() -> None:
    message = hello(
        held("a", report("init"), report("run"), running="eval"),
        held("b", running="init"),
        held("c#2", report("run", "infrastructure", rollout_id="c#2")),
        held("d"),
    )
    assert isinstance(decoded(message), WorkerHello)


@pytest.mark.parametrize(
    "segment",
    [
        {"token_ids": [2**31]},
        {"token_ids": [-1]},
        {"token_ids": [1], "logprobs": [float("nan")], "trained": True},
        {"token_ids": [1], "weight_version": 2**31},
    ],
)
def test_a_trajectory_that_could_not_be_stored(segment: Fields) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"segments": [segment]}), type=Trajectory)
