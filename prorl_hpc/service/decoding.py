"""JSON bodies into message types, strictly: unknown fields are refused, and errors name the field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from prorl_hpc.service.errors import invalid

T = TypeVar("T")
_PATH = re.compile(r" - at `([^`]+)`$")


def decode_body(body: bytes, type_: Any) -> Any:
    """``body`` as ``type_``. Raises Refusal 400."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}", "$") from error
    for path, unknown, allowed in _unknown_fields(raw, _shape(type_), "$"):
        raise invalid(f"unknown field {unknown!r} at {path}; allowed: {', '.join(allowed)}", f"{path}.{unknown}")
    try:
        return msgspec.convert(raw, type_)
    except (msgspec.ValidationError, RecursionError) as error:
        found = _PATH.search(str(error))
        field = found.group(1) if found else "$"
        missing = re.search(r"missing required field `(\w+)`", str(error))
        raise invalid(str(error), f"{field}.{missing.group(1)}" if missing else field) from error


@lru_cache
def _shape(type_: Any) -> inspect.Type:
    return inspect.type_info(type_)


def _unknown_fields(value: Any, shape: inspect.Type, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """(where, field, fields allowed there) of each unknown one; values of the wrong type are passed over here."""
    if isinstance(shape, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in shape.fields}
        tag = {shape.tag_field} if shape.tag_field else set()
        for name, inner in value.items():
            if name in fields:
                yield from _unknown_fields(inner, fields[name], f"{path}.{name}")
            elif name not in tag:
                yield path, name, sorted(fields)
    elif isinstance(shape, inspect.ListType) and isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _unknown_fields(inner, shape.item_type, f"{path}[{i}]")
    elif isinstance(shape, inspect.UnionType):
        structs = [one for one in shape.types if isinstance(one, inspect.StructType)]
        if len(structs) == 1:
            yield from _unknown_fields(value, structs[0], path)
