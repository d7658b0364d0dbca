"""Imports a module that a setting names."""

from __future__ import annotations

import importlib
from types import ModuleType

from prorl_hpc.messages.errors import ConfigError


def import_told(told: str, module_name: str) -> ModuleType:
    """``told``: the setting and its value, for messages. ConfigError if it does not import."""
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{told}: the module {module_name} does not import ({error}). Install it in this environment or put its "
            "directory on PYTHONPATH, on every node"
        ) from error
    except (Exception, SystemExit) as error:  # the user's module: whatever it raises, its name and place are wanted
        raise ConfigError(
            f"{told}: the module {module_name} breaks while it is imported: {type(error).__name__}: {error}"
        ) from error
