"""Options that tasks with a process beside them share; each message names ``task.options.NAME``."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from typing import Any

from prorl_hpc.messages.errors import ConfigError


def read_mapping(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Names and values that are sent to the other process as JSON."""
    value = given.get(name) or {}
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.options.{name}: {error}; only what JSON has can be given") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"task.options.{name}={value!r}: expected names and values, like {{size: 4}}")
    return dict(value)


def read_seconds(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"task.options.{name}={value!r}: expected seconds, more than 0")
    return float(value)


def read_name(given: Mapping[str, Any], name: str, expected: str) -> str:
    """A text that must be given."""
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"task.options.{name}={value!r}: expected {expected}")
    return value


def interpreter_problem(python: str) -> str:
    """What is wrong with ``task.options.python``; empty if nothing is."""
    if python and shutil.which(python) is None:
        return f"task.options.python={python} is not a program on this machine: give the path of a Python interpreter"
    return ""
