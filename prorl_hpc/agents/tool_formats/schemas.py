"""Whether a call fits the tools on offer: the part of JSON schema that tools use (type, required, enum)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from prorl_hpc.messages.trajectory import ToolCall, ToolSchema

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def problem_of_call(call: ToolCall, tools: Sequence[ToolSchema]) -> str:
    """In words for the model, or empty. Nothing is known to be wrong where no tools are given."""
    if not tools:
        return ""
    tool = tool_named(call.name, tools)
    if tool is None:
        names = [tool.name for tool in tools]
        near = difflib.get_close_matches(call.name, names, n=1)
        suggestion = f" (did you mean {near[0]}?)" if near else ""
        return f"there is no tool {call.name[:60]!r}{suggestion}; tools: {', '.join(names)}"
    wrong = _wrong_arguments(call.arguments, tool.parameters)
    return f"{call.name}: {wrong}; {_takes(tool)}" if wrong else ""


def tool_named(name: str, tools: Sequence[ToolSchema]) -> ToolSchema | None:
    return next((tool for tool in tools if tool.name == name), None)


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that ``schema`` allows; empty: not known."""
    if not isinstance(schema, Mapping):
        return frozenset()
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            return frozenset().union(*map(types_of, options)) if all(map(types_of, options)) else frozenset()
    types = schema.get("type")
    names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def properties_of(tool: ToolSchema | None) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties") if tool else None
    return properties if isinstance(properties, Mapping) else {}


def _wrong_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return ""
    for name, value in arguments.items():
        if name not in properties:
            if schema.get("additionalProperties"):
                continue
            return f"unknown argument {name[:60]!r}"
        if wrong := _wrong_value(value, properties[name]):
            return f"argument {name} {wrong}"
    required = schema.get("required")
    missing = [name for name in required if name not in arguments] if isinstance(required, list) else []
    return f"argument {missing[0]} is missing" if missing else ""


def _wrong_value(value: Any, schema: Any) -> str:
    types = types_of(schema)
    if types and types <= _TYPES.keys() and not any(_is(value, type_) for type_ in types):
        return f"is {type_name(value)}, expected {' or '.join(sorted(types))}"
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(options, list) and value not in options:
        return f"is {str(value)[:40]!r}, expected one of {', '.join(map(str, options))}"
    return ""


def _is(value: Any, type_: str) -> bool:
    if isinstance(value, bool):
        return type_ == "boolean"
    return isinstance(value, _TYPES[type_]) or (type_ == "integer" and isinstance(value, float) and value.is_integer())


def type_name(value: Any) -> str:
    return next((name for name in ("boolean", *_TYPES) if _is(value, name)), "null")


def _takes(tool: ToolSchema) -> str:
    required = tool.parameters.get("required") or []
    takes = [
        f"{name} ({' or '.join(sorted(types_of(schema))) or 'any'}{'' if name in required else ', optional'})"
        for name, schema in properties_of(tool).items()
    ]
    return f"it takes {', '.join(takes) or 'no arguments'}"
