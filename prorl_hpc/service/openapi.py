"""The OpenAPI 3.1 document, made from the message types."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from prorl_hpc import __version__
from prorl_hpc.messages.batch import BatchProgress, BatchResult, BatchSpec
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.messages.rollout import RolloutProgress, RolloutResult, RolloutSpec
from prorl_hpc.messages.status import RunStatus, ServerStatus, WorkerStatus
from prorl_hpc.service.errors import ErrorAnswer

_TYPES: tuple[Any, ...] = (
    BatchSpec,
    BatchProgress,
    BatchResult,
    list[RolloutSpec],
    list[RolloutProgress],
    RolloutProgress,
    RolloutResult,
    WeightUpdate,
    list[WeightUpdated],
    RunStatus,
    list[WorkerStatus],
    list[ServerStatus],
    ErrorAnswer,
)
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_WAIT = {
    "name": "wait_s",
    "in": "query",
    "required": False,
    "description": "seconds to wait for the result",
    "schema": {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
}


@lru_cache
def openapi_document() -> dict[str, Any]:
    found, components = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(map(str, _TYPES), found, strict=True))

    def content(type_: Any) -> dict[str, Any]:
        return {"application/json": {"schema": schemas[str(type_)]}}

    def call(summary: str, answer: Any, *, body: Any = None, pending: Any = None, refusals: str = "") -> dict[str, Any]:
        responses: dict[str, Any] = {"200": {"description": "done", "content": content(answer)}}
        if pending is not None:
            responses["202"] = {"description": "not over yet", "content": content(pending)}
        for status in ("401", *refusals.split()):
            responses[status] = {"description": "refused", "content": content(ErrorAnswer)}
        made: dict[str, Any] = {"summary": summary, "responses": responses}
        if body is not None:
            made["requestBody"] = {"required": True, "content": content(body)}
        return made

    paths: dict[str, Any] = {
        "/healthz": {
            "get": {"summary": "The service is there", "security": [], "responses": {"200": {"description": "ok"}}}
        },
        "/v1/status": {"get": call("The whole run", RunStatus)},
        "/v1/workers": {"get": call("Workers and their pools", list[WorkerStatus])},
        "/v1/servers": {"get": call("LLM servers", list[ServerStatus])},
        "/v1/weights": {
            "post": call(
                "New weights to every LLM server", list[WeightUpdated], body=WeightUpdate, refusals="400 409 413 503"
            )
        },
        "/v1/batches": {
            "post": call("Order a batch of groups", BatchProgress, body=BatchSpec, refusals="400 409 413 429 503")
        },
        "/v1/batches/{id}": {
            "parameters": [_ID],
            "get": call("How far a batch is", BatchProgress, refusals="404"),
            "delete": call("Cancel a batch", BatchProgress, refusals="404 409"),
        },
        "/v1/batches/{id}/result": {
            "parameters": [_ID, _WAIT],
            "get": call("A batch's groups", BatchResult, pending=BatchProgress, refusals="400 404 410 503"),
        },
        "/v1/rollouts": {
            "post": call(
                "Order single rollouts", list[RolloutProgress], body=list[RolloutSpec], refusals="400 409 413 429 503"
            )
        },
        "/v1/rollouts/{id}": {
            "parameters": [_ID],
            "get": call("Where a rollout stands", RolloutProgress, refusals="404"),
            "delete": call("Cancel a rollout", RolloutProgress, refusals="404 409"),
        },
        "/v1/rollouts/{id}/result": {
            "parameters": [_ID, _WAIT],
            "get": call("How a rollout ended", RolloutResult, pending=RolloutProgress, refusals="400 404 410 503"),
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "prorl_hpc rollout service", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
