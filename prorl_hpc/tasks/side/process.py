"""A process beside this one that answers calls: asynchronous for rollouts, and once for datasets and checks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prorl_hpc.tasks.side.host import kill_with_descendants

_HOST = Path(__file__).with_name("host.py")
_LONGEST_ANSWER_BYTES = 64 * 2**20
_KEPT_BYTES = 4000
"""Of what the process printed, to be shown when it breaks."""
_ENDING_S = 1.0
"""How long a process whose answers have ended may take to end itself, so that its exit code can be told."""


class SideError(Exception):
    """The other process broke, hung, or said what is wrong; in words for a person."""


class SideProcess:
    """``async with SideProcess("text_environment", python) as side: await side.call("begin", 30.0, …)``.

    Leaving the block, by whichever way, kills the process and all that it started; they end too when this process does.
    """

    def __init__(self, module: str, python: str = "", env: Mapping[str, str] | None = None) -> None:
        """``module``: one beside host.py. ``python``: an interpreter; empty: this one, which then finds modules where this
        process does. ``env``: variables beside this process's own."""
        self._arguments = _arguments(module, python)
        self._paths = [] if python else list(sys.path)
        self._env = {**os.environ, **(env or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._printed = bytearray()
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LONGEST_ANSWER_BYTES,
                env=self._env,
                start_new_session=True,
            )
        except OSError as error:
            raise SideError(f"{self._arguments[0]} cannot be started: {error.strerror}") from error
        self._listening = asyncio.create_task(self._keep_what_it_prints())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._listening is not None, "left after it was entered"
        kill_with_descendants(self._process.pid)
        self._listening.cancel()
        await asyncio.gather(self._process.wait(), self._listening, return_exceptions=True)

    async def call(self, name: str, timeout_s: float | None, **arguments: Any) -> Any:
        """What the function ``name`` returns; SideError if it raises, ends or does not answer within ``timeout_s`` (None: no
        limit)."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(_line(name, self._paths, arguments))
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise SideError(f"{name} did not answer within {timeout_s or 0:g} s{self._last_words()}") from error
        except (ConnectionError, ValueError) as error:  # it ended meanwhile, or the answer is longer than any may be
            line = b"" if isinstance(error, ConnectionError) else b"\n"
        if not line:
            assert self._listening is not None
            ending = {asyncio.ensure_future(self._process.wait()), self._listening}
            await asyncio.wait(ending, timeout=_ENDING_S)
            kill_with_descendants(self._process.pid)
            code = await self._process.wait()
            raise SideError(f"the process {_ended(code)} during {name}{self._last_words()}")
        return _value(name, line)

    async def _keep_what_it_prints(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            self._printed += chunk
            del self._printed[:-_KEPT_BYTES]

    def _last_words(self) -> str:
        return _words(bytes(self._printed))


def call_once(module: str, python: str, name: str, timeout_s: float, **arguments: Any) -> Any:
    """One call to a process that is then ended; blocks. SideError as above."""
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                _arguments(module, python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,
            )
        except OSError as error:
            raise SideError(f"{python} cannot be started: {error.strerror}") from error
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()
        clock = threading.Timer(timeout_s, _too_late, (late, process.pid))
        clock.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended at once: the missing answer says so
                process.stdin.write(_line(name, [] if python else list(sys.path), arguments))
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
        finally:
            clock.cancel()
            kill_with_descendants(process.pid)
            code = process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if line:
            return _value(name, line)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _KEPT_BYTES))
        happened = f"{name} did not answer within {timeout_s:g} s"
        if not late.is_set():
            happened = f"the process {_ended(code)} during {name}"
        raise SideError(happened + _words(printed.read()))


def _arguments(module: str, python: str) -> list[str]:
    return [python or sys.executable, "-u", str(_HOST), module]


def _line(name: str, paths: list[str], arguments: Mapping[str, Any]) -> bytes:
    return json.dumps({"call": name, "paths": paths, **arguments}).encode() + b"\n"


def _value(name: str, line: bytes) -> Any:
    try:
        answer = json.loads(line)
        if "error" not in answer:
            return answer["value"]
    except (ValueError, TypeError, KeyError) as error:
        raise SideError(f"{name} gave an answer that cannot be read: {line[:200]!r}") from error
    place = f" ({answer['place']})" if answer.get("place") else ""
    raise SideError(f"{answer['error']}{place}")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _words(printed: bytes) -> str:
    text = printed.decode(errors="replace").strip()
    return f"; it printed last: {text[-600:]}" if text else ""


def _too_late(late: threading.Event, pid: int) -> None:
    late.set()
    kill_with_descendants(pid)
