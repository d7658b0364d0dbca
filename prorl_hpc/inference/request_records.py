"""What each request cost an LLM server, as its agent saw it: one line of JSON per request (engine.record_requests).

``bench fit`` makes a latency model of it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.inference import Completion

log = logging.getLogger(__name__)


class ServedBy(msgspec.Struct, frozen=True, tag="engine"):
    """Whose requests the next lines are: ``engine`` as in ``vllm 0.32.0``, on a node with so many CPUs."""

    engine: str
    node: str
    cpus: int


Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
"""Of tokens; more are in no prompt."""


class RequestRecord(msgspec.Struct, frozen=True, tag="request"):
    """``began``: when it went into the engine, Unix time; ``seconds`` it was there, after ``queued_s`` at the gate before
    it (engine.max_parallel_requests). ``running_at_start`` and ``running`` (mean) count it too. ``reason``: why it ended;
    empty: the engine gave no answer."""

    began: Seconds
    seconds: Seconds
    queued_s: Seconds
    prompt_tokens: Count
    cached_tokens: Count
    generated_tokens: Count
    running_at_start: Annotated[int, msgspec.Meta(ge=1)]
    running: Seconds
    reason: str = ""


@dataclass
class OpenRecord:
    """A request in the engine. ``answer`` is set when there is one."""

    began: float
    integral: float
    running_at_start: int
    answer: Completion | None = None


class RunningMean:
    """How many requests are in the engine, and the integral of that over time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.count = 0
        self._integral = 0.0
        self._since = clock()

    def change(self, by: int) -> tuple[float, float]:
        """(now, integral until now); the count is another from now on."""
        now = self.clock()
        self._integral += self.count * (now - self._since)
        self._since = now
        self.count += by
        return now, self._integral


class RequestRecords:
    """Appends to ``path``. A disk that is full ends the recording, not the requests."""

    def __init__(self, path: Path, engine: str, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self._running = RunningMean(clock)
        before = b"\n" if self._file.tell() else b""  # the end of an earlier agent may have cut its last line off
        self._write(ServedBy(engine, node, len(os.sched_getaffinity(0))), before)

    def begin(self) -> OpenRecord:
        now, integral = self._running.change(+1)
        return OpenRecord(now, integral, self._running.count)

    def end(self, opened: OpenRecord, prompt_tokens: int, queued_s: float) -> None:
        now, integral = self._running.change(-1)
        seconds = now - opened.began
        answer = opened.answer
        self._write(
            RequestRecord(
                began=round(time.time() - seconds, 6),
                seconds=round(seconds, 6),
                queued_s=round(queued_s, 6),
                prompt_tokens=prompt_tokens,
                cached_tokens=answer.cached_prompt_tokens if answer else 0,
                generated_tokens=len(answer.token_ids) if answer else 0,
                running_at_start=opened.running_at_start,
                running=round((integral - opened.integral) / seconds, 4) if seconds > 0 else opened.running_at_start,
                reason=answer.finish_reason if answer else "",
            )
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, record: RequestRecord | ServedBy, before: bytes = b"") -> None:
        if self._file.closed:
            return
        try:
            self._file.write(before + self._encoder.encode(record) + b"\n")
        except OSError as error:
            log.error("%s: recording of requests ends here (engine.record_requests): %s", self._path, error)
            self._file.close()


_HEADS = (b'{"type":"engine"', b'{"type":"request"')


class ServerRequests(msgspec.Struct, frozen=True):
    """``served_by``: one for each time that its agent was started. ``cut_lines``: numbers of the lines that the end of an
    agent cut off; they are left out."""

    server: str
    served_by: list[ServedBy]
    records: list[RequestRecord]
    cut_lines: list[int]


def read_requests(directory: Path) -> list[ServerRequests]:
    """Of each server. ConfigError names a line that is wrong, or a file that cannot be read."""
    return [_read(path) for path in sorted(directory.glob("*.jsonl"))]


def _read(path: Path) -> ServerRequests:
    decoder: msgspec.json.Decoder[ServedBy | RequestRecord] = msgspec.json.Decoder(ServedBy | RequestRecord)
    found = ServerRequests(path.stem, [], [], [])
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            read = decoder.decode(line)
            if isinstance(read, RequestRecord) and read.cached_tokens > read.prompt_tokens:
                raise msgspec.ValidationError(f"{read.cached_tokens} cached of {read.prompt_tokens} prompt tokens")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if _is_cut(line, b"".join(lines[number : number + 1])):
                found.cut_lines.append(number)
                continue
            raise ConfigError(
                f"{path}, line {number}: not the record of a request: {error}. Delete the line if the rest is as it was "
                "recorded, else record anew"
            ) from error
        if isinstance(read, ServedBy):
            found.served_by.append(read)
        else:
            found.records.append(read)
    return found


def _is_cut(line: bytes, following: bytes) -> bool:
    """Whether the end of its agent cut ``line`` off: it begins as one does, has no end, and the next agent's lines follow, or
    none."""
    begins = any(line.startswith(head[: len(line)]) for head in _HEADS)
    return begins and not line.endswith(b"}") and (not following or following.startswith(_HEADS[0]))
