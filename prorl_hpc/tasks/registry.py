"""Finds the AgentHandler that a configuration names: a built-in task, or any class by import path.

A task of your own needs no registration: ``task.name=my_package.my_module:MyHandler`` is imported on the
workers and where the dataset is read, so the module must be importable there (installed, or on PYTHONPATH).
The class is constructed with the TaskConfig and implements prorl_hpc.tasks.protocol.AgentHandler.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, cast

from prorl_hpc.config.schema import TaskConfig
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.tasks.importing import import_told
from prorl_hpc.tasks.protocol import AgentHandler

BUILT_IN: dict[str, str] = {
    "file_trail": "prorl_hpc.tasks.file_trail:FileTrail",
    "file_quest": "prorl_hpc.tasks.file_quest:FileQuest",
    "solve": "prorl_hpc.tasks.solve:Solve",
    "reasoning_gym": "prorl_hpc.tasks.reasoning_gym:ReasoningGym",
    "text_env": "prorl_hpc.tasks.text_env:TextEnv",
    "verifiers": "prorl_hpc.tasks.verifiers_env:VerifiersEnv",
}
"""Task name → import path."""

_METHODS = ("generate_rows", "check_row", "init", "run", "eval")


def get_handler(name: str, task: TaskConfig) -> AgentHandler:
    """The handler ``name``, constructed with ``task``. Raises ConfigError for unknown names and for
    settings that the task refuses."""
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, BUILT_IN, n=3, cutoff=0.5)
        suggestion = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"task.name={name} is not a known task: {suggestion}Known: {', '.join(sorted(BUILT_IN))}; "
            "your own: my_package.my_module:MyHandler"
        )
    return _construct(_import_class(path), task)


def _import_class(path: str) -> Callable[[TaskConfig], Any]:
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"task.name={path}: expected module:Class, like my_package.my_module:MyHandler")
    module = import_told(f"task.name={path}", module_name)
    handler = getattr(module, class_name, None)
    if not isinstance(handler, type):
        classes = sorted(n for n, value in vars(module).items() if isinstance(value, type) and not n.startswith("_"))
        raise ConfigError(f"task.name={path}: {module_name} has no class {class_name!r}; it has: {', '.join(classes)}")
    missing = [method for method in _METHODS if not callable(getattr(handler, method, None))]
    if missing:
        raise ConfigError(
            f"task.name={path}: {class_name} is not an AgentHandler, it lacks {', '.join(missing)} "
            "(see prorl_hpc.tasks.protocol)"
        )
    return cast("Callable[[TaskConfig], Any]", handler)


def _construct(handler: Callable[[TaskConfig], Any], task: TaskConfig) -> AgentHandler:
    try:
        return cast(AgentHandler, handler(task))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"task.name={task.name}: {handler} could not be made from the task's configuration: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_options(task: TaskConfig, known: Iterable[str]) -> None:
    """Raise ConfigError if ``task.options`` has a name that the task does not know."""
    allowed = sorted(known)
    for name in task.options:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"task.options.{name} is not an option of {task.name}: {suggestion}Allowed: {', '.join(allowed) or 'none'}"
            )
