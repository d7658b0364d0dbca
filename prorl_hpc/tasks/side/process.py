"""This process's side of an environment's: one that prepares, and a fork of it for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from prorl_hpc.tasks.side.host import kill_with_descendants

_HOST = Path(__file__).with_name("host.py")
_LONGEST_ANSWER_BYTES = 64 * 2**20
_SHOWN_BYTES = 600
"""Of what the process printed, when it breaks."""
_ENDING_S = 1.0
"""How long a process whose answers have ended may take to end itself, so that its exit code can be told."""
_LONGEST_SOCKET = 100
Call = tuple[str, dict[str, Any]]


class SideError(Exception):
    """The other process broke, hung, or said what is wrong; in words for a person."""


def call_once(module: str, python: str, calls: Sequence[Call], timeout_s: float) -> Any:
    """The last call's value, of a process that is then ended; blocks for at most ``timeout_s``. SideError."""
    host = _Host(module, python)
    try:
        host.start()
        return host.ask(calls, timeout_s)
    finally:
        host.end()


class SideServer:
    """Prepares an environment once, in a process of its own, and plays each episode in a fork of that process.

    The process is started when it is first needed, again if it died, and ends with this object or this process.
    """

    def __init__(self, module: str, python: str, prepare: Mapping[str, Any], timeout_s: float) -> None:
        """``module``: one beside host.py. ``python``: an interpreter; empty: this one, which then finds modules where this
        process does. ``prepare``: arguments of the module's function of that name, which may take ``timeout_s``."""
        self._module = module
        self._python = python
        self._prepare = dict(prepare)
        self._timeout_s = timeout_s
        self._starting = threading.Lock()
        self._host: _Host | None = None
        self._socket = Path()

    async def ready(self) -> None:
        """Wait until the process is prepared. SideError."""
        await asyncio.to_thread(self._ensure)

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[SideEpisode]:
        """A fork, killed with all that it started when the block is left, by whichever way. SideError."""
        if self._host is None or not self._host.alive:
            await self.ready()
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=_LONGEST_ANSWER_BYTES)
        except OSError as error:
            raise SideError(f"the environment's process does not answer: {error}") from error
        episode = SideEpisode(reader, writer)
        try:
            await episode.greet(self._timeout_s)
            yield episode
        finally:
            episode.end()

    def _ensure(self) -> None:
        with self._starting:
            if self._host is not None and self._host.alive:
                return
            host = _Host(self._module, self._python)
            # Also when this object is forgotten, or the interpreter ends.
            weakref.finalize(self, host.end)
            host.start()
            host.ask([("prepare", self._prepare)], self._timeout_s)
            # From the next call on the other process removes the directory if this one is killed.
            directory = _short_directory()
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
            self._socket = directory / "side"
            host.ask([("serve", {"socket": str(self._socket)})], self._timeout_s)
            self._host = host


class SideEpisode:
    """One fork, on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._pid = 0
        self._log = Path()

    async def greet(self, timeout_s: float) -> None:
        hello = await self._answer("its start", timeout_s)
        self._pid, self._log = hello["pid"], Path(hello["log"])

    async def call(self, name: str, timeout_s: float | None, **arguments: Any) -> Any:
        """What the function ``name`` returns; SideError if it raises, ends or does not answer within ``timeout_s`` (None: no
        limit)."""
        with contextlib.suppress(ConnectionError):  # it ended meanwhile: the missing answer says so
            self._writer.write(_line(name, arguments))
            await self._writer.drain()
        return await self._answer(name, timeout_s)

    def end(self) -> None:
        self._writer.close()
        if self._pid:
            kill_with_descendants(self._pid)
        for path in (self._log, self._log.with_suffix(".exit")) if self._pid else ():
            path.unlink(missing_ok=True)

    async def _answer(self, name: str, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except TimeoutError as error:
            raise SideError(f"{name} did not answer within {timeout_s or 0:g} s{_words(self._log)}") from error
        except ConnectionError:
            line = b""
        except ValueError as error:
            raise SideError(f"{name} gave an answer of more than {_LONGEST_ANSWER_BYTES} bytes") from error
        if not line:
            raise SideError(f"the process {await self._ending()} during {name}{_words(self._log)}")
        return _value(name, line)

    async def _ending(self) -> str:
        noted = self._log.with_suffix(".exit")
        deadline = asyncio.get_running_loop().time() + _ENDING_S
        while not (text := noted.read_text() if noted.exists() else ""):
            if asyncio.get_running_loop().time() > deadline:
                return "ended"
            await asyncio.sleep(0.02)
        return _ended(int(text))


class _Host:
    """A process of host.py; blocking, for any thread."""

    def __init__(self, module: str, python: str) -> None:
        self._arguments = [python or sys.executable, "-u", str(_HOST), module]
        self._paths = [] if python else list(sys.path)
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                start_new_session=True,
            )
        except OSError as error:
            raise SideError(f"{self._arguments[0]} cannot be started: {error.strerror}") from error

    def ask(self, calls: Sequence[Call], timeout_s: float) -> Any:
        """The last call's value; the process is killed after ``timeout_s``."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        late = threading.Event()
        clock = threading.Timer(timeout_s, _too_late, (late, self._process.pid))
        clock.start()
        value = None
        try:
            for name, arguments in calls:
                with contextlib.suppress(BrokenPipeError):  # it ended: the missing answer says so
                    self._process.stdin.write(_line(name, {"paths": self._paths, **arguments}))
                    self._process.stdin.flush()
                line = self._process.stdout.readline()
                if not line:
                    raise SideError(
                        self._ending(name, f"did not answer within {timeout_s:g} s" if late.is_set() else "")
                    )
                value = _value(name, line)
        finally:
            clock.cancel()
        return value

    def end(self) -> None:
        if self._process is not None:
            kill_with_descendants(self._process.pid)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]  # both are pipes
            self._process = None
        self._printed.close()

    def _ending(self, name: str, late: str) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        kill_with_descendants(self._process.pid)
        happened = f"{name} {late}" if late else f"the process {_ended(self._process.wait())} during {name}"
        return happened + _last_words(self._printed)


def _short_directory() -> Path:
    """For sockets: their paths end at 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="prorl-side-"))
    if len(str(directory)) <= _LONGEST_SOCKET:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="prorl-side-", dir="/tmp"))


def _too_late(late: threading.Event, pid: int) -> None:
    late.set()
    kill_with_descendants(pid)


def _line(name: str, arguments: Mapping[str, Any]) -> bytes:
    return json.dumps({"call": name, **arguments}).encode() + b"\n"


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
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _words(log: Path) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as stream:
        return _last_words(stream)


def _last_words(stream: IO[bytes]) -> str:
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - _SHOWN_BYTES))
    text = stream.read().decode(errors="replace").strip()
    return f"; it printed last: {text}" if text else ""
