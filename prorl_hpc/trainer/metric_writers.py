"""Where the numbers of steps and evaluations go: metrics.jsonl always, and each of the writers beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.trainer.scalars import scalars
from prorl_hpc.trainer.wandb_log import WandbLog

log = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """Takes the records that ``observe.metrics`` describes."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricWriters:
    """``log`` first: it is what a resumed run, the display and the report read. Lines that its disk refuses are kept, and
    tried again with the next."""

    def __init__(self, log: MetricsLog, writers: list[MetricWriter]) -> None:
        self.log, self._writers = log, writers
        self._waiting: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self._waiting.append(record)
        if error := self._append():
            log.error(
                "%s takes no more lines: %s. %d wait, and are tried again with the next: make room there",
                self.log.path,
                error,
                len(self._waiting),
            )
        for writer in self._writers:
            writer.write(record)

    def close(self) -> None:
        """A last try for lines that the disk refused."""
        if error := self._append():
            lost = ", ".join(f"{record['kind']} {record['step']}" for record in self._waiting)
            log.error("%s takes no more lines: %s. These are lost: %s", self.log.path, error, lost)

    def _append(self) -> OSError | None:
        """Write all that wait; what the disk says if it refuses."""
        try:
            while self._waiting:
                self.log.append(self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            return error
        return None


@contextmanager
def open_writers(config: ProrlConfig, run: RunDirectory) -> Iterator[MetricWriters]:
    """All that the configuration asks for, closed at the end. Raises RunError if W&B cannot be begun."""
    lines = MetricsLog(run.metrics_file)
    makers: list[Callable[[], MetricWriter]] = [lambda: TensorBoard(run.tensorboard)]
    if config.trainer.wandb != "off":
        makers.append(lambda: WandbLog(config, run, written=len(lines.read())))
    with ExitStack() as stack:
        writers = []
        for make in makers:
            writers.append(make())
            stack.callback(writers[-1].close)
        everywhere = MetricWriters(lines, writers)
        stack.callback(everywhere.close)
        yield everywhere


class TensorBoard:
    """Numbers as scalars, under ``step/`` and ``eval/``. Training goes on without, if the disk refuses them: the numbers are in
    metrics.jsonl too."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        self._lost = False
        self._writer: Any = SummaryWriter(str(directory))

    def write(self, record: dict[str, Any]) -> None:
        if self._lost:
            return
        try:
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, record["step"])
            self._writer.flush()
        except OSError as error:
            self._gone(error)

    def close(self) -> None:
        if self._lost:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._gone(error)

    def _gone(self, error: OSError) -> None:
        self._lost = True
        log.error("TensorBoard gets no more numbers, %s does not take them: %s", self._directory, error)
