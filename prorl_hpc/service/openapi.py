"""The OpenAPI 3.1 document, made from the calls and the message types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from prorl_hpc import __version__
from prorl_hpc.service.calls import JSON, NDJSON, Call
from prorl_hpc.service.errors import ErrorAnswer
from prorl_hpc.service.limits import BOUNDS, MAX_ROLLOUTS_PER_CALL
from prorl_hpc.service.parameters import MAX_TEXT, Parameter

_PREFIX = "#/components/schemas/"
_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "the id of the batch, rollout, worker or server",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TEXT, "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"},
}
_GROUPS_OF_TWO = {
    "if": {"properties": {"filter": {"const": "all"}}, "required": ["filter"]},
    "else": {"properties": {"group_size": {"minimum": 2}}},
}
"""A single sample is never informative."""
_REFUSED_ALWAYS = (400, 401)
_REFUSED_BODY = (408, 413)
_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "string"}}}


def openapi_document(calls: Sequence[Call]) -> dict[str, Any]:
    types = _types(calls)
    found, components = msgspec.json.schema_components(types, ref_template=_PREFIX + "{name}")
    schemas = dict(zip(map(str, types), found, strict=True))
    for call in calls:
        if call.body is not None:
            _tighten(schemas[str(call.body)], components)
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "prorl_hpc rollout service", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _types(calls: Sequence[Call]) -> list[Any]:
    found: list[Any] = [ErrorAnswer]
    for call in calls:
        found += [type_ for type_ in (call.answer, call.pending, call.body) if type_ is not None and type_ not in found]
    return found


def _operation(call: Call, schemas: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": call.summary,
        "operationId": _operation_id(call),
        "responses": _responses(call, schemas),
    }
    if call.open:
        made["security"] = []
    parameters = ([_ID] if "{id}" in call.path else []) + [_parameter(one) for one in call.params]
    if parameters:
        made["parameters"] = parameters
    if call.body is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[str(call.body)]}}}
    return made


def _operation_id(call: Call) -> str:
    return "_".join([call.method.lower(), *re.findall(r"[a-z]+", call.path.removeprefix("/v1"))])


def _responses(call: Call, schemas: dict[str, Any]) -> dict[str, Any]:
    content = {call.media_type: {"schema": schemas[str(call.answer)]}}
    if call.media_type == NDJSON:
        line = schemas[str(call.answer)]["$ref"].removeprefix(_PREFIX)
        text = f"Lines, each a {line} in JSON; blank lines only say that the service is there; after a fault an ErrorAnswer"
        content = {NDJSON: {"schema": {"type": "string", "description": text}}}
    responses: dict[str, Any] = {"200": {"description": "done", "content": content}}
    if call.pending is not None:
        responses["202"] = {"description": "not over yet", "content": {JSON: {"schema": schemas[str(call.pending)]}}}
    refusal = {JSON: {"schema": schemas[str(ErrorAnswer)]}}
    statuses = set(call.refusals) | set(() if call.open else _REFUSED_ALWAYS)
    statuses |= set(() if call.body is None else _REFUSED_BODY)
    if call.open:
        statuses.add(400)
    for status in sorted(statuses):
        told: dict[str, Any] = {"description": HTTPStatus(status).phrase, "content": refusal}
        if status in (429, 503):
            told["headers"] = _RETRY_AFTER
        responses[str(status)] = told
    return responses


def _parameter(parameter: Parameter[Any]) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": "query",
        "required": False,
        "description": parameter.description,
        "schema": parameter.schema,
    }


def _tighten(schema: dict[str, Any], components: dict[str, Any]) -> None:
    """Say of a body what is checked beyond its types: ranges, and that unknown fields are refused."""
    if schema.get("type") == "array":
        schema |= {"minItems": 1, "maxItems": MAX_ROLLOUTS_PER_CALL}
    for name in _reachable(schema, components):
        struct = components[name]
        if "properties" not in struct:
            continue
        struct["additionalProperties"] = False
        if "type" in struct["properties"] and "enum" in struct["properties"]["type"]:
            struct["required"] = [field for field in struct["required"] if field != "type"]
        for field, bound in BOUNDS.get(name, {}).items():
            _bind(struct["properties"][field], bound)
        if name == "BatchSpec":
            struct |= _GROUPS_OF_TWO


def _bind(schema: dict[str, Any], bound: dict[str, Any]) -> None:
    target = next((one for one in schema.get("anyOf", []) if one.get("type") != "null"), schema)
    target |= {keyword: value for keyword, value in bound.items() if keyword != "items"}
    if "items" in bound:
        target["items"] = {**target["items"], **bound["items"]}


def _reachable(schema: Any, components: dict[str, Any]) -> Iterable[str]:
    """Names of the components that ``schema`` refers to, directly or not."""
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        for name in re.findall(_PREFIX + r"([^'\"]+)", str(waiting.pop())):
            if name not in seen:
                seen.add(name)
                waiting.append(components[name])
    return seen
