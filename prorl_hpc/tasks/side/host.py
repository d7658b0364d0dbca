"""``python host.py MODULE``: answers calls to the functions of the neighbour module ``MODULE.py``, until standard input ends.

A call is one JSON line ``{"call": NAME, …arguments}`` on standard input; its answer is one JSON line on what was standard
output: ``{"value": …}`` or ``{"error": "…", "place": "file:line"}``. What the environment prints goes to standard error.
The call ``serve`` is the last: from then on each connection to the Unix socket that it names gets a fork of this process,
with all that is imported and prepared, which answers calls on the connection, prints into a file beside the socket (the
end of it is kept), and ends with the connection and all that it started. When standard input ends everything does,
whatever the environment is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import queue
import random
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Set
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

HERE = Path(__file__).resolve().parent
_POLL_S = 0.1
"""Between two looks for forks that have ended, or print much."""
_LONGEST_LOG_BYTES, _KEPT_LOG_BYTES = 1 << 20, 1 << 16
_PR_SET_CHILD_SUBREAPER = 36
_scratch: list[Path] = []
"""The socket's directory, removed when standard input ends: then nobody else is there to do it."""


def main() -> NoReturn:
    _adopt_orphans()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the environment prints is not an answer
    # Python puts a script's own directory first, where our module names would hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    calls = _load(sys.argv[1])
    lines = _listen(os.dup(0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)  # an environment that asks at the terminal gets an end, not our next call
    os.close(devnull)
    _answer_calls(calls, lines, answers)


def _adopt_orphans() -> None:
    """What loses its parent below us becomes our child: a daemon, too, is found and ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _children() -> dict[int, list[int]]:
    """Process → its children, of all on this machine."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    return children


def kill_with_descendants(pid: int) -> None:
    """SIGKILL for ``pid`` and the processes below it, those in sessions of their own included; our own process dies last."""
    children, found = _children(), [pid]
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


def _listen(source: int) -> queue.SimpleQueue[bytes]:
    """Lines of a file descriptor, read in a thread that ends this process and all below it when they end."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        with os.fdopen(source, "rb") as stream, contextlib.suppress(OSError):
            for line in stream:
                lines.put(line)
        for directory in _scratch:
            shutil.rmtree(directory, ignore_errors=True)
        kill_with_descendants(os.getpid())

    threading.Thread(target=listen, daemon=True).start()
    return lines


def _answer_calls(calls: ModuleType, lines: queue.SimpleQueue[bytes], answers: BinaryIO) -> NoReturn:
    while True:
        message = json.loads(lines.get())
        if message["call"] == "serve":
            _serve(calls, Path(message["socket"]), answers)
        _write(answers, _call(calls, message))


def _call(calls: ModuleType, message: dict[str, Any]) -> dict[str, Any]:
    try:
        for entry in message.pop("paths", ()):
            if entry not in sys.path:
                sys.path.append(entry)
        value = getattr(calls, message.pop("call"))(**message)
        return {"value": asyncio.run(value) if inspect.iscoroutine(value) else value}
    except BaseException as error:  # the environment's own code: whatever it raises, its words and place are wanted
        last = traceback.extract_tb(error.__traceback__)[-1]
        traceback.print_exc()
        place = "" if Path(last.filename).parent == HERE else f"{last.filename}:{last.lineno}"
        words = str(error) if isinstance(error, getattr(calls, "Refused", ())) else f"{type(error).__name__}: {error}"
        return {"error": words, "place": place}


def _write(out: BinaryIO, answer: dict[str, Any]) -> None:
    try:
        line = json.dumps(answer)
    except (TypeError, ValueError) as error:
        line = json.dumps({"error": f"the answer is not JSON: {error}", "place": ""})
    out.write(line.encode() + b"\n")
    out.flush()


# forks


def _serve(calls: ModuleType, path: Path, answers: BinaryIO) -> NoReturn:
    """A fork for each connection; how it ended is written to LOG.exit, for the connection tells nothing of it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(256)
    listener.settimeout(_POLL_S)
    _scratch.append(path.parent)
    _write(answers, {"value": None})
    helpers = set(_children().get(os.getpid(), ()))  # of the prepared environment: all episodes need them
    logs: dict[int, Path] = {}
    number, left_over = 0, False
    while True:
        left_over = _note_ends(logs) or left_over
        left_over = left_over and _end_orphans(helpers | logs.keys())
        for log in logs.values():
            _shorten(log)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        number += 1
        log = path.with_name(f"{number}.log")
        pid = os.fork()
        if pid == 0:
            listener.close()
            _be_a_fork(calls, connection, log)
        logs[pid] = log
        connection.close()


def _note_ends(logs: dict[int, Path]) -> bool:
    """Whether a fork has ended."""
    before = len(logs)
    for pid, log in list(logs.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del logs[pid]
            if log.exists():  # whoever had the connection is still interested
                log.with_suffix(".exit").write_text(str(os.waitstatus_to_exitcode(status)))
    return len(logs) < before


def _end_orphans(ours: Set[int]) -> bool:
    """Kill what a fork that has ended has left to us; whether it takes another look to see all of it gone."""
    orphans = [pid for pid in _children().get(os.getpid(), ()) if pid not in ours]
    for pid in orphans:
        kill_with_descendants(pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


def _shorten(log: Path) -> None:
    """Keep the end of what an episode printed. The episode goes on appending, so nothing has to be opened anew."""
    with contextlib.suppress(FileNotFoundError):  # its episode is over
        if log.stat().st_size > _LONGEST_LOG_BYTES:
            with log.open("r+b") as stream:
                stream.seek(-_KEPT_LOG_BYTES, os.SEEK_END)
                kept = stream.read(_KEPT_LOG_BYTES)
                stream.truncate(0)
            with log.open("ab") as stream:
                stream.write(kept)


def _be_a_fork(calls: ModuleType, connection: socket.socket, log: Path) -> NoReturn:
    _scratch.clear()
    os.setsid()
    _adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection.settimeout(None)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    # All forks would draw the same numbers as the process that they come from.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    answers = os.fdopen(os.dup(connection.fileno()), "wb")
    _write(answers, {"value": {"pid": os.getpid(), "log": str(log)}})
    _answer_calls(calls, _listen(connection.detach()), answers)


if __name__ == "__main__":
    main()
