"""Schemathesis against the OpenAPI document, in process, over a fake service with some data in it.

All checks are on. What is told to them beyond the document:
- 503 is an answer, not a fault: /process before /start, no LLM server, and so on.
- A body that fits the schema may still be 400 where two fields must fit each other (as many rows as wanted groups),
  which JSON Schema cannot say; /start when started is 400 because ProRL Agent's clients expect that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Any

import schemathesis
from fake_service import FakeService
from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import SchemathesisConfig

from prorl_hpc.messages.batch import BatchSpec
from prorl_hpc.messages.rollout import RolloutSpec
from prorl_hpc.service.app import make_app
from prorl_hpc.service.bearer_token import BearerToken

_TOKEN = "the-token"
_ACCEPTED = ["2xx", "401", "403", "404", "409", "422", "429", "503"]
_MAY_BE_400 = ("/v1/batches", "/v1/rollouts", "/v1/weights", "/v1/servers", "/start", "/process", "/add_llm_server")


class AnyTask(Collection[str]):
    """The schema cannot name the tasks of a run, so that this one serves all."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(["t"])

    def __len__(self) -> int:
        return 1


async def _filled() -> FakeService:
    service = FakeService(AnyTask(), max_live=10**9)
    service.add_worker("w0")
    service.add_own_server("s0")
    await service.submit_batch(BatchSpec("b", "t", [{"id": "r"}], 1, 2))
    await service.submit_rollouts([RolloutSpec("a", "t", {})])
    return service


def _config() -> SchemathesisConfig:
    checks: dict[str, Any] = {
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "503"]},
        "positive_data_acceptance": {"expected-statuses": _ACCEPTED},
    }
    lenient = {"positive_data_acceptance": {"expected-statuses": [*_ACCEPTED, "400"]}}
    operations = [{"include-path": path, "include-method": "POST", "checks": lenient} for path in _MAY_BE_400]
    auth = {"openapi": {"token": {"bearer": _TOKEN}}}
    return SchemathesisConfig.from_dict({"checks": checks, "auth": auth, "operations": operations})


schema = schemathesis.openapi.from_asgi(
    "/openapi.json",
    BearerToken(make_app(asyncio.run(_filled())), _TOKEN),
    config=_config(),
    headers={"Authorization": f"Bearer {_TOKEN}"},
)


_KNOWN = {"batches": "b", "rollouts": "a", "workers": "w0", "servers": "s0"}


def _settings(examples: int, **more: Any) -> settings:
    return settings(
        **more,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def _check(case: schemathesis.Case) -> None:
    if case.query.get("follow") in (True, "true"):
        case.query["follow"] = "false"  # else it never ends
    case.call_and_validate()


@schema.parametrize()
@_settings(8)
def test_the_document_holds(case: schemathesis.Case) -> None:
    _check(case)


@schema.parametrize()
@_settings(5, phases=[Phase.generate])
def test_the_document_holds_for_what_is_there(case: schemathesis.Case) -> None:
    if "id" in case.path_parameters:
        case.path_parameters["id"] = _KNOWN[case.path.split("/")[2]]
        _check(case)
