"""Calls to an environment with reset and step; an episode is played in a process of its own (see host)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import random
import sys
from types import ModuleType
from typing import Any


class Refused(Exception):
    """What this environment, or what it answered, cannot be used for; in words for a person."""


_make: Any = None
_environment: Any = None


def prepare(env: str) -> None:
    """Import what makes the environment, before the episodes' processes are forked."""
    global _make
    _make = _find(env)


def begin(kwargs: dict[str, Any], seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Make the environment and reset it: {"text", "system_prompt"}."""
    global _environment
    _seed_everything(seed)
    _environment = _make(**kwargs)
    for method in ("reset", "step"):
        if not callable(getattr(_environment, method, None)):
            raise Refused(f"it has no method {method}: it is not an environment with reset and step")
    answer = _reset(seed, options)
    observation = answer[0] if isinstance(answer, tuple) and len(answer) == 2 else answer
    system_prompt = getattr(_environment, "system_prompt", "")
    return {
        "text": _text(observation, "reset"),
        "system_prompt": system_prompt if isinstance(system_prompt, str) else "",
    }


def step(action: str) -> dict[str, Any]:
    """{"text", "reward", "terminated", "truncated", "numbers"}; the environment is closed when the episode ends."""
    answer = _environment.step(action)
    if not isinstance(answer, tuple) or len(answer) not in (4, 5):
        size = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
        raise Refused(
            f"step returned {size}: expected (observation, reward, terminated, truncated, info) "
            "or (observation, reward, done, info)"
        )
    observation, reward, terminated, *truncated, info = answer
    # Old environments say in info that a time limit ended the episode.
    cut = bool(truncated[0]) if truncated else bool(info.get("TimeLimit.truncated", False))
    over = bool(terminated) or cut
    if over and callable(getattr(_environment, "close", None)):
        _environment.close()
    return {
        "text": "" if over and observation is None else _text(observation, "step"),
        "reward": _reward(reward),
        "terminated": bool(terminated) and not (not truncated and cut),
        "truncated": cut,
        "numbers": _numbers(info),
    }


def _find(env: str) -> Any:
    module_name, _, name = env.rpartition(":")
    module = _import(module_name) if module_name else None
    if module is None or not name.isidentifier():
        return _from_gymnasium(name)
    if not callable(found := getattr(module, name, None)):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise Refused(f"{module_name} has no class or function {name!r}; it has: {', '.join(sorted(own)) or 'none'}")
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Refused(
            f"the module {name} does not import in {sys.executable} ({error}): install it there, put its directory on "
            "PYTHONPATH, or name another interpreter in task.options.python"
        ) from error


def _from_gymnasium(env: str) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise Refused(
            f"{env} is not module:Class, and to be looked up as a Gymnasium id it needs the package gymnasium in "
            f"{sys.executable} ({error}): pip install gymnasium, or name another interpreter in task.options.python"
        ) from error
    try:
        gymnasium.spec(env)
    except gymnasium.error.Error as error:
        raise Refused(f"{env} is neither module:Class nor an id that Gymnasium knows: {error}") from error
    return lambda **kwargs: gymnasium.make(env, **kwargs)


def _seed_everything(seed: int) -> None:
    """For environments that draw from the global generators: this process has no other use for them."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _reset(seed: int, options: dict[str, Any]) -> Any:
    with contextlib.suppress(ValueError, TypeError):  # built-in callables that tell no signature get everything
        parameters = inspect.signature(_environment.reset).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            wanted = {"seed": seed, "options": options or None}
            if options and "options" not in parameters:
                raise Refused("its reset takes no options: leave task.options.reset and the rows' options empty")
            if "seed" not in parameters and callable(getattr(_environment, "seed", None)):
                _environment.seed(seed)
            return _environment.reset(**{name: value for name, value in wanted.items() if name in parameters})
    return _environment.reset(seed=seed, options=options or None)


def _text(observation: Any, method: str) -> str:
    if not isinstance(observation, str):
        raise Refused(
            f"{method} gave an observation of type {type(observation).__name__}: text is needed. Wrap the environment in a "
            "class whose reset and step give text and whose step takes text (docs/environments.md)"
        )
    return observation


def _reward(reward: Any) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise Refused(f"step gave the reward {reward!r}, which is not a number") from error
    if not math.isfinite(number):
        raise Refused(f"step gave the reward {number}: expected a finite number")
    return number


def _numbers(info: Any) -> dict[str, float]:
    """The finite numbers of ``info``, numpy's among them."""
    numbers: dict[str, float] = {}
    for name, value in info.items() if isinstance(info, dict) else ():
        if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
            continue
        with contextlib.suppress(TypeError, ValueError):  # an array of several numbers
            if math.isfinite(number := float(value)):
                numbers[str(name)] = number
    return numbers
