"""``metrics.jsonl``: one JSON object per line, only ever appended.

The trainer writes it; the display and the report read it and cope with keys that are missing.
Every line has ``kind``, ``step`` and ``time`` (seconds since the epoch).

``kind: step``, after each optimizer step (counted from 1):

- ``reward``, ``reward_std`` (unbiased): over all finished rollouts of the batch, those of uniform groups too; ``reward_by_task``:
  {task: mean};
  ``reward_accepted``: over the groups that were accepted
- ``rollouts``, ``rollouts_failed``: counts; of groups ``groups_accepted``, ``groups_equal_rewards`` (those of them whose samples all have one
  reward: no advantage; dynamic sampling lets none in), ``groups_uniform`` (dropped by it: nothing to learn),
  ``groups_broken`` (dropped: too few samples), ``groups_replaced`` (dropped ones in whose place another prompt was taken),
  ``groups_carried`` (went on into the next step, which counts their rollouts), ``groups_stale`` (accepted, but too old)
- ``staleness``, ``staleness_max``: age of the trained tokens in weight versions, mean and largest
- ``failures``: {kind: rollouts}
- ``finish``: {why it ended: share} of the finished rollouts' main conversations; ``branches``: further conversations
  per rollout, each a sample of its own
- ``response_tokens``, ``response_tokens_max``: what the policy wrote in a finished rollout, mean and largest
- ``tokens_generated``, ``tokens_trained``, ``tokens_total``: tokens that the policy wrote, that went into the loss, with prompts
- ``seconds``: {``rollouts``, ``training``, ``publishing``, ``saving``, ``total``}, those that apply; in ``rollouts`` the trainer
  waited for them, which is ``idle_fraction`` of the step. Evaluations are in no step; ahead of time the next batch is made during
  them. ``generation_s``: how long the batch was being made, perhaps while the trainer learned
- ``rollouts_per_s``, ``tokens_per_s`` (generated): per second of ``generation_s``; ``training_tokens_per_s`` (computed: all passes),
  ``trained_tokens_per_s``: per second of training
- ``loss``, ``grad_norm``, ``learning_rate``, ``entropy``, ``ratio``, ``clip_fraction`` (and ``_low``, ``_high``); ``ppo_kl``: mean of
  log π_old − log π_θ over all updates; ``weight_version``: what was published after the step
- ``advantage_mean``, ``_std``, ``_min``, ``_max``: with ``advantage=gae`` before they are whitened; with it too ``value_loss``,
  ``value_clip_fraction``, and of the values before the first update ``value_mean``, ``return_mean``, ``explained_variance``
- ``kl`` (to the reference model), ``dual_clip_fraction``, ``correction_mean``, ``correction_max``, ``masked_fraction``: where their
  settings are on. What was not measured is left out and never 0
- ``optimizer_steps``: updates that were made; ``updates_skipped``: updates left out, for their loss or gradient was not finite;
  if all were, there is no ``loss`` and what else is measured in them
- ``logprob_gap_mean``, ``logprob_gap_max``: |engine - trainer| over the trained tokens, nats, without what the step's own updates
  change: with ``proximal=engine`` those of its first update alone; ``probe_gap``: on the probe

``kind: eval``, held-out prompts (``step`` 0: before training): ``reward`` mean, ``successes`` rollouts with reward 1
of ``rollouts`` finished ones, ``seconds`` (a number, in no step's), ``weight_version`` that all of them are of. ``held_out``: {``prompts``,
``samples``, ``temperature``, ``digest``} of what was evaluated: rewards can be compared where it is equal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


class MetricsLog:
    """Append-only log of one run's numbers. One process writes it, anybody reads it at any time.

    Lines have ``kind`` (``step`` or ``eval``), ``step`` and ``time`` (seconds since the epoch);
    the trainer documents the rest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line and flush it to the disk. A torn last line, left by a writer that was killed, is closed
        first, so that it spoils nothing but itself."""
        line = msgspec.json.encode(record) + b"\n"
        with self.path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first; empty if there is no file yet. Lines that are not JSON objects are skipped:
        only a torn write leaves one."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        records = []
        for line in content.splitlines():
            try:
                records.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                continue
        return records


def newest_per_step(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The records of ``kind`` by rising ``step``. A resumed run repeats the steps after its checkpoint;
    the last record of a step counts."""
    wanted = [record for record in records if record.get("kind") == kind and isinstance(record.get("step"), int)]
    by_step = {record["step"]: record for record in wanted}
    return [by_step[step] for step in sorted(by_step)]
