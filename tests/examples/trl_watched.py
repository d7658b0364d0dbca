"""``trl_watched.py EXAMPLE RUN STEPS NOTES LOST``: the example with TRL, and what its loss was given, a step a line.

Rollout number LOST of each step is made a failed one on its way to the example.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
from trl import GRPOTrainer

from prorl_hpc.messages.rollout import RolloutResult, Status
from prorl_hpc.service.sync_client import SyncRolloutClient

example, run, steps, notes, lost = sys.argv[1:]
scored, waited = GRPOTrainer._generate_and_score_completions, vars(SyncRolloutClient)["wait_rollout"]


def noted(trainer: GRPOTrainer, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    batch = scored(trainer, inputs)
    lines = []
    for i, advantage in enumerate(batch["advantages"].tolist()):
        prompt, completion = batch["prompt_mask"][i].bool(), batch["completion_mask"][i].bool()
        lines.append(
            {
                "prompt_ids": batch["prompt_ids"][i][prompt].tolist(),
                "completion_ids": batch["completion_ids"][i][completion].tolist(),
                "loss_mask": batch["tool_mask"][i][completion].tolist(),
                "logprobs": batch["sampling_per_token_logps"][i][completion].tolist(),
                "advantage": advantage,
            }
        )
    with Path(notes).open("a") as file:
        file.write(json.dumps(lines) + "\n")
    return batch


def failing(client: SyncRolloutClient, rollout_id: str) -> RolloutResult:
    result = waited.__get__(client, SyncRolloutClient)(rollout_id)
    if result.sample == int(lost):
        return msgspec.structs.replace(result, status=Status.FAILED, reward=None)
    return result


GRPOTrainer._generate_and_score_completions = noted
SyncRolloutClient.wait_rollout = failing
sys.argv = [example, run, steps]
runpy.run_path(example, run_name="__main__")
