"""Where the numbers of steps and evaluations go: metrics.jsonl always, and each of the writers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.observe.metrics import MetricsLog
from prorl_hpc.trainer.scalars import scalars
from prorl_hpc.trainer.wandb_log import WandbLog


class MetricWriter(Protocol):
    """Takes the records that ``observe.metrics`` describes."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricWriters:
    """``log`` first: it is what a resumed run, the display and the report read."""

    def __init__(self, log: MetricsLog, writers: list[MetricWriter]) -> None:
        self.log, self._writers = log, writers

    def write(self, record: dict[str, Any]) -> None:
        self.log.append(record)
        for writer in self._writers:
            writer.write(record)


@contextmanager
def open_writers(config: ProrlConfig, run: RunDirectory) -> Iterator[MetricWriters]:
    """All that the configuration asks for, closed at the end. Raises RunError if W&B cannot be begun."""
    log = MetricsLog(run.metrics_file)
    makers: list[Callable[[], MetricWriter]] = [lambda: TensorBoard(run.tensorboard)]
    if config.trainer.wandb != "off":
        makers.append(lambda: WandbLog(config, run, written=len(log.read())))
    with ExitStack() as stack:
        writers = []
        for make in makers:
            writers.append(make())
            stack.callback(writers[-1].close)
        yield MetricWriters(log, writers)


class TensorBoard:
    """Numbers as scalars, under ``step/`` and ``eval/``."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
