"""``python host.py MODULE``: answers calls to the functions of the neighbour module ``MODULE.py``, until standard input ends.

A call is one JSON line ``{"call": NAME, …arguments}`` on standard input; its answer is one JSON line on what was standard
output: ``{"value": …}`` or ``{"error": "…", "place": "file:line"}``. What the environment prints goes to standard error.
When standard input ends, this process does, with all that it started, whatever the environment is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

HERE = Path(__file__).resolve().parent


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the environment prints is not an answer
    # Python puts a script's own directory first, where our module names would hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    calls = _load(sys.argv[1])
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    with asyncio.Runner() as runner:
        while True:
            message = json.loads(lines.get())
            _answer(answers, _call(runner, calls, message))


def kill_with_descendants(pid: int) -> None:
    """SIGKILL for ``pid`` and the processes below it, those in sessions of their own included; our own process dies last."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    for each in sorted(found, key=lambda other: other == os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"prorl_side_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None, f"{name}.py lies beside this file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _listen(lines: queue.SimpleQueue[bytes]) -> None:
    with os.fdopen(os.dup(0), "rb") as stdin:
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)  # an environment that asks at the terminal gets an end, not our next call
        os.close(devnull)
        for line in stdin:
            lines.put(line)
    kill_with_descendants(os.getpid())


def _call(runner: asyncio.Runner, calls: ModuleType, message: dict[str, Any]) -> dict[str, Any]:
    try:
        for entry in message.pop("paths", ()):
            if entry not in sys.path:
                sys.path.append(entry)
        value = getattr(calls, message.pop("call"))(**message)
        if inspect.isawaitable(value):
            value = runner.run(_await(value))
        return {"value": value}
    except BaseException as error:  # the environment's own code: whatever it raises, its words and place are wanted
        last = traceback.extract_tb(error.__traceback__)[-1]
        traceback.print_exc()
        place = "" if Path(last.filename).parent == HERE else f"{last.filename}:{last.lineno}"
        words = str(error) if isinstance(error, getattr(calls, "Refused", ())) else f"{type(error).__name__}: {error}"
        return {"error": words, "place": place}


async def _await(value: Any) -> Any:
    return await value


def _answer(out: BinaryIO, answer: dict[str, Any]) -> None:
    try:
        line = json.dumps(answer)
    except (TypeError, ValueError) as error:
        line = json.dumps({"error": f"the answer is not JSON: {error}", "place": ""})
    out.write(line.encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    main()
