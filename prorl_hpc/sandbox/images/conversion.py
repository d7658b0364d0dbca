"""Bring all images of a dataset into the cache: some at a time, each once, going on where an earlier try stopped."""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images.building import BuildOptions, pull
from prorl_hpc.sandbox.images.cache import ImageCache
from prorl_hpc.sandbox.images.references import Reference

DONE, SKIPPED, FAILED, WAITING = "done", "skipped", "failed", "not started"
_PASSING = re.compile(
    r"timeout|timed out|reset by peer|unexpected EOF|toomanyrequests|\b(429|500|502|503|504)\b|temporary failure", re.I
)
"""Worth another try: of the network or the registry, not of the image."""
_FULL = re.compile(r"no space left|disk quota exceeded", re.I)
RETRY_S = 10.0
"""Before the second try; doubled before each further one."""


@dataclass
class Outcome:
    """Of one image. ``state`` is done (made now), skipped (was there), failed or not started."""

    reference: str
    name: str
    state: str = WAITING
    reason: str = ""
    size: int = 0
    seconds: float = 0.0
    tries: int = 0


@dataclass
class Report:
    """Of a conversion; written anew after each image, so that it is true whenever the process ends."""

    outcomes: list[Outcome]
    path: Path | None = None
    started: float = field(default_factory=time.time)

    def count(self, state: str) -> int:
        return sum(outcome.state == state for outcome in self.outcomes)

    @property
    def counts(self) -> dict[str, int]:
        return {state: self.count(state) for state in (DONE, SKIPPED, FAILED, WAITING)}

    def write(self) -> None:
        if self.path is None:
            return
        content = {
            "started": self.started,
            "written": time.time(),
            "counts": self.counts,
            "images": [asdict(outcome) for outcome in self.outcomes],
        }
        aside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        aside.write_text(json.dumps(content, indent=1) + "\n")
        aside.replace(self.path)


def convert(
    cache: ImageCache,
    references: list[Reference],
    *,
    at_a_time: int,
    tries: int,
    options: BuildOptions,
    report_path: Path | None,
    tell: Callable[[str], None],
    verbose: bool = False,
) -> Report:
    """Pull what is not in the cache. A failure ends that image alone; a full disk ends it all, for each further pull
    would fail, too. On KeyboardInterrupt builders are ended, the report is written, and the interrupt goes on."""
    report = Report([Outcome(str(r), r.cache_name) for r in references], report_path)
    report.write()  # before hours of work: it can be written
    conversion = _Conversion(cache, report, options, tries, tell, verbose)
    for pair in zip(references, report.outcomes, strict=True):
        conversion.waiting.put(pair)
    threads = [threading.Thread(target=conversion.work, name=f"conversion {n}") for n in range(at_a_time)]
    for thread in threads:
        thread.start()
    try:
        # Not join: interrupted, it takes a thread that runs for ended (Python 3.11 and 3.12).
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
    finally:
        conversion.stop.set()
        for thread in threads:
            thread.join()
        report.write()
    if conversion.broke:
        raise conversion.broke
    return report


class _Conversion:
    def __init__(
        self,
        cache: ImageCache,
        report: Report,
        options: BuildOptions,
        tries: int,
        tell: Callable[[str], None],
        verbose: bool,
    ) -> None:
        self.waiting: queue.SimpleQueue[tuple[Reference, Outcome]] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.broke: Exception | None = None
        self._cache = cache
        self._report = report
        self._options = options
        self._tries = tries
        self._tell = tell
        self._verbose = verbose
        self._lock = threading.Lock()
        self._ended = 0

    def work(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    reference, outcome = self.waiting.get_nowait()
                except queue.Empty:
                    return
                self._bring(reference, outcome)
                self._note(outcome)
        except Exception as error:  # of ours, not of an image: the whole conversion ends with it
            self.broke = error
            self.stop.set()

    def _bring(self, reference: Reference, outcome: Outcome) -> None:
        started = time.monotonic()
        for number in range(1, self._tries + 1):
            outcome.tries = number
            try:
                entry, made = pull(self._cache, reference, self._progress(reference), self._options, self.stop)
            except SandboxError as error:
                outcome.state, outcome.reason = (WAITING, "stopped") if self.stop.is_set() else (FAILED, str(error))
                if _FULL.search(outcome.reason):
                    self._tell("there is no room left: the rest is not started")
                    self.stop.set()
                if self.stop.is_set() or number == self._tries or not _PASSING.search(outcome.reason):
                    break
                self._tell(
                    f"{reference}: try {number} of {self._tries} failed, and another may help: {_short(outcome)}"
                )
                self.stop.wait(RETRY_S * 2 ** (number - 1))
            else:
                outcome.state, outcome.reason, outcome.size = (DONE if made else SKIPPED), "", entry.size
                break
        outcome.seconds = round(time.monotonic() - started, 1)

    def _progress(self, reference: Reference) -> Callable[[str], None]:
        if self._verbose:
            return lambda line: self._tell(f"{reference}: {line}")
        return lambda line: None

    def _note(self, outcome: Outcome) -> None:
        with self._lock:
            if outcome.state != WAITING:
                self._ended += 1
                what = f"{outcome.state}, {outcome.size / 2**20:.1f} MiB in {outcome.seconds:.0f} s"
                what = f"{FAILED}: {_short(outcome)}" if outcome.state == FAILED else what
                self._tell(f"[{self._ended}/{len(self._report.outcomes)}] {outcome.reference}: {what}")
            self._report.write()


def _short(outcome: Outcome) -> str:
    """The reason's most telling line: the hint, else the builder's last word."""
    lines = [line.strip() for line in outcome.reason.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith(("FATAL", "→"))]
    return (fatal or lines or [""])[-1]
