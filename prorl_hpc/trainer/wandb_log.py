"""Weights & Biases: one run there for a run here, however often it is started again.

The package is optional (``pip install 'prorl_hpc[wandb]'``). Its files lie in the run directory, under ``wandb/``; with
``trainer.wandb=offline`` nothing is sent, and ``wandb sync RUN/wandb/offline-run-*`` sends it later.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from typing import Any

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.trainer.scalars import scalars

log = logging.getLogger(__name__)
ANSWER_S = 60.0
"""So long the server of W&B may take to answer at the start."""
SEND_S = 20.0
"""So long it may take what is left at the end: an attempt that is stopped has little time."""
SHOWN = ("model", "task", "trainer", "run", "engine")
"""Groups of settings that the run shows there."""


class WandbLog:
    """Every record is one row there. Rows are counted over all attempts, by ``written``, the records that metrics.jsonl has so
    far: steps that a resumed run trains again come behind those of before, as in that file. Charts are drawn over
    ``trained_steps``, the optimizer step."""

    def __init__(self, config: ProrlConfig, run: RunDirectory, *, written: int) -> None:
        """Raises RunError if W&B refuses, or does not answer within ``ANSWER_S`` seconds."""
        import wandb

        directory = run.path / "wandb"
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(name, str(directory))
        settings = wandb.Settings(
            init_timeout=ANSWER_S,
            finish_timeout=SEND_S,
            console="off",  # the run's logs are in the run directory
            silent=True,
            disable_git=True,
            disable_code=True,
        )
        shown = dataclasses.asdict(config)
        try:
            self._run: Any = wandb.init(
                mode="online" if config.trainer.wandb == "online" else "offline",
                project=config.trainer.wandb_project,
                dir=str(run.path),
                id=run_id(run),
                name=run.run_id,
                resume="allow",
                config={group: shown[group] for group in SHOWN},
                settings=settings,
            )
        except wandb.Error as error:
            raise RunError(
                f"Weights & Biases could not be begun (trainer.wandb={config.trainer.wandb}): {error}. Log in with `wandb "
                "login` or set WANDB_API_KEY, or set trainer.wandb=offline and send the files later with `wandb sync`"
            ) from error
        self._run.define_metric("trained_steps", hidden=True)
        self._run.define_metric("*", step_metric="trained_steps")
        self._written = written
        self._lost = False

    def write(self, record: dict[str, Any]) -> None:
        """Training goes on without W&B if its process is lost: the numbers are in metrics.jsonl too."""
        row, self._written = self._written, self._written + 1
        if self._lost:
            return
        try:
            self._run.log(scalars(record) | {"trained_steps": record["step"]}, step=row)
        except Exception as error:
            self._lost = True
            log.error("Weights & Biases gets no more numbers, its process does not take them: %s", error)

    def close(self) -> None:
        if not self._lost:
            self._run.finish()


def run_id(run: RunDirectory) -> str:
    """The same for all attempts: the name of the run directory, of letters that W&B takes."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run.run_id)[:128]
