"""New weights from the trainer to every inference server, and the proof that they arrived.

An engine can answer that all is well and still serve old weights in part, so every update carries a probe: a
prompt with the trainer's own logprobs, which the servers must reproduce.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.errors import RunError
from prorl_hpc.messages.inference import WeightUpdate, WeightUpdated
from prorl_hpc.trainer.removing import clear_away
from prorl_hpc.trainer.rollout_service import RolloutService

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
PROBE_TEXT = "A probe: 17 + 25 = 42, and the quick brown fox jumps over the lazy dog."
PROBE_TOKENS = 24
ASK_AGAIN_S = 0.5


def probe_tokens(model_directory: Path) -> list[int]:
    """Ids of a short fixed text, the same for all versions of the weights."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(PROBE_TEXT, add_special_tokens=False).ids[:PROBE_TOKENS]
    if len(ids) < 2:
        raise RunError(
            f"{model_directory}/tokenizer.json makes {len(ids)} token(s) of {PROBE_TEXT!r}: is it this model's?"
        )
    return ids


class WeightDirectory:
    """Private directory for published weights: memory of this node if all processes run here and it has room,
    else on the run's shared storage."""

    def __init__(self, run: RunDirectory, *, single_node: bool, weight_bytes: int) -> None:
        # Two versions are kept while a third is written.
        self._local = (
            single_node and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * weight_bytes
        )
        self._storage, self._weight_bytes = run.weights, weight_bytes
        self.path = run.make_runtime_dir(str(SHARED_MEMORY)) if self._local else run.weights
        self._used = [self.path]
        self.remove_older(keep=0)

    def remove_older(self, keep: int = 2) -> None:
        """Leave the newest ``keep`` versions: a server may still be reading the last but one."""
        found = [path for directory in self._used if directory.is_dir() for path in directory.iterdir()]
        versions = sorted((number, path) for path in found if (number := _version_number(path)) is not None)
        for _, old in versions[: max(0, len(versions) - keep)]:
            clear_away(old)

    async def write(self, number: int, write: Callable[[Path], Awaitable[list[Path]]]) -> list[Path]:
        """The files that ``write`` makes of version ``number`` in the directory that it is given. If memory has no room for them
        any more, this and later versions go to the run's storage. Raises RunError if that refuses them."""
        try:
            return await write(self.version(number))
        except OSError as error:
            self._refused(number, error)
        return await self.write(number, write)

    def _refused(self, number: int, error: OSError) -> None:
        """Go on with the run's storage, or raise RunError if it is that."""
        clear_away(self.path / f"version-{number}")
        space = f"they need {_gib(self._weight_bytes)}, and {self.path} has {_gib(_free(self.path))} free (a quota may allow less)"
        if self.path == self._storage:
            raise RunError(
                f"weights {number} cannot be written to {self.path}: {error}; {space}. Make room there, or set "
                "trainer.publish=direct, which writes none; then resume the run"
            ) from error
        log.warning(
            "%s has no room for weights %d (%s; %s): they go to %s from now on, which may be slower",
            self.path,
            number,
            error,
            space,
            self._storage,
        )
        self.path = self._storage
        self._used.append(self.path)

    def version(self, number: int) -> Path:
        path = self.path / f"version-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def close(self) -> None:
        """Give node memory back; weights on shared storage go too, the checkpoints have them."""
        self.remove_older(keep=0)
        if self._local:
            shutil.rmtree(self._used[0], ignore_errors=True)


def _version_number(path: Path) -> int | None:
    number = path.name.removeprefix("version-")
    return int(number) if number != path.name and number.isascii() and number.isdecimal() else None


def _free(path: Path) -> int:
    return shutil.disk_usage(path if path.exists() else path.parent).free


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"


async def announce(
    service: RolloutService,
    update: WeightUpdate,
    *,
    patience_s: float = 0.0,
) -> float | None:
    """Have the servers that are there load ``update``. Returns the largest probe gap (None if no engine can
    score). Servers that are lost, or come later, are not waited for: the service gives them no rollouts before they have
    the weights. Raises RunError if no server has them after ``patience_s`` seconds, or if one does not take them or does
    not agree with the trainer, twice: the first time it may just be dying."""
    version = update.version
    deadline = time.monotonic() + patience_s
    complained: set[str] = set()
    while True:
        answers = await service.update_weights(update)
        there = [answer for answer in answers if not answer.lost]
        complaints = {a.server_id: text for a in there if (text := _complaint(a, update))}
        if there and not complaints:
            break
        if complained & complaints.keys():
            raise RunError(
                f"weights {version} did not reach every inference server that is there, and rollouts from old weights "
                "would be trained on as new ones: " + "; ".join(complaints.values())
            )
        if not there and time.monotonic() >= deadline:
            raise RunError(
                f"weights {version} were published, but no inference server came to load them within {patience_s:.0f} s "
                "(run.start_timeout_s): see their logs"
            )
        complained |= complaints.keys()
        await asyncio.sleep(ASK_AGAIN_S)
    for answer in answers:
        if answer.lost:
            log.warning("weights %d are served without %s: %s", version, answer.server_id, answer.error)
    return max((answer.probe_gap for answer in there if answer.probe_gap is not None), default=None)


def _complaint(answer: WeightUpdated, update: WeightUpdate) -> str:
    if answer.error:
        return f"{answer.server_id}: {answer.error}"
    if answer.version != update.version:
        return f"{answer.server_id} serves version {answer.version}"
    if answer.probe_gap is None or update.probe is None:
        return ""
    if not answer.probe_gap <= (tolerance := update.probe.tolerance):
        return (
            f"{answer.server_id} says that it loaded them, but its logprobs of the probe differ from the trainer's by "
            f"{answer.probe_gap:.4g} nats (trainer.probe_tolerance={tolerance}): it serves other weights, or computes in "
            "a much coarser dtype"
        )
    return ""
