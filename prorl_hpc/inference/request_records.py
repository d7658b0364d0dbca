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

import msgspec

from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.messages.inference import Completion

log = logging.getLogger(__name__)


class ServedBy(msgspec.Struct, frozen=True, tag="engine"):
    """Whose requests the next lines are: ``engine`` as in ``vllm 0.32.0``, on a node with so many CPUs."""

    engine: str
    node: str
    cpus: int


class RequestRecord(msgspec.Struct, frozen=True, tag="request"):
    """``began``: when it went into the engine, Unix time; ``seconds`` it was there, after ``queued_s`` at the gate before
    it (engine.max_parallel_requests). ``running_at_start`` and ``running`` (mean) count it too. ``reason``: why it ended;
    empty: the engine gave no answer."""

    began: float
    seconds: float
    queued_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    running_at_start: int
    running: float
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
        self._write(ServedBy(engine, node, len(os.sched_getaffinity(0))))

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

    def _write(self, record: RequestRecord | ServedBy) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
        except OSError as error:
            log.error("%s: recording of requests ends here (engine.record_requests): %s", self._path, error)
            self._file.close()


class ServerRequests(msgspec.Struct, frozen=True):
    """``served_by``: one for each time that its agent was started."""

    server: str
    served_by: list[ServedBy]
    records: list[RequestRecord]


def read_requests(directory: Path) -> list[ServerRequests]:
    """Of each server. ConfigError names a line that is wrong; a last one that was cut off by the end of its process is left
    out."""
    return [_read(path) for path in sorted(directory.glob("*.jsonl"))]


def _read(path: Path) -> ServerRequests:
    decoder: msgspec.json.Decoder[ServedBy | RequestRecord] = msgspec.json.Decoder(ServedBy | RequestRecord)
    found = ServerRequests(path.stem, [], [])
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path}, line {number}: not the record of a request: {error}") from error
        if isinstance(read, ServedBy):
            found.served_by.append(read)
        else:
            found.records.append(read)
    return found
