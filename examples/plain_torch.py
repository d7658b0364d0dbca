"""A trainer in some fifty lines of plain torch for a rollout service that runs: group advantages and DAPO's loss, nothing hidden.

    python -m prorl_hpc serve experiment=quick --detach      # any model and task; this one needs no GPU
    python examples/plain_torch.py runs/latest 8             # 8 steps

One process, float32, one sample at a time. docs/bring-your-own-trainer.md says what a trainer must keep to.
"""

import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.batch import BatchResult, BatchSpec, GroupOutcome
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate
from prorl_hpc.messages.rollout import SamplingParams, Status
from prorl_hpc.service.sync_client import SyncRolloutClient
from prorl_hpc.tasks.dataset import load_rows

GROUPS, GROUP_SIZE, LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 4, 8, 1e-3, 0.2, 0.28
PROBE = list(range(10, 34))  # any ids that the model has: the servers must agree on their logprobs
PROBE_TOLERANCE = 0.05  # nats, for float32 on both sides; bfloat16 moves single tokens by some tenths


def logprobs_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Of tokens 1..n-1, each given those before it, at the temperature that they were sampled with (1)."""
    tokens = torch.tensor([ids])
    return model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def publish(service: SyncRolloutClient, model: PreTrainedModel, version: int, directory: Path) -> None:
    """Every server has these weights, and shows it by the probe, before a rollout is ordered from them."""
    model.save_pretrained(directory / f"version-{version}")  # safetensors with Hugging Face names
    paths = [str(path) for path in sorted((directory / f"version-{version}").glob("*.safetensors"))]
    probe = WeightProbe(PROBE, logprobs_of(model, PROBE).tolist(), PROBE_TOLERANCE)
    answers = service.update_weights(WeightUpdate(version, paths, probe))
    if wrong := [
        answer for answer in answers if answer.error and not answer.lost
    ]:  # one that is lost comes back for them
        raise SystemExit(f"weights {version} did not reach every server: {wrong}")
    shutil.rmtree(directory / f"version-{version - 1}", ignore_errors=True)


def samples_of(batch: BatchResult) -> list[tuple[list[int], list[bool], list[float], float]]:
    """(ids, loss mask, the engine's logprobs, advantage) of each conversation of each rollout that can be trained on."""
    samples = []
    for group in (group for group in batch.groups if group.outcome is GroupOutcome.ACCEPTED):
        done = [rollout for rollout in group.rollouts if rollout.status is Status.DONE]  # to fail is not a reward of 0
        rewards = torch.tensor([rollout.reward for rollout in done])
        for rollout, advantage in zip(done, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True):
            samples += [(c.token_ids, c.loss_mask, c.logprobs, advantage) for c in rollout.trajectory.conversations]
    return samples


def main(run_directory: str, steps: int) -> None:
    run = RunDirectory.open(run_directory)
    task, path = run.load_config().task, run.load_config().model.path
    rows = load_rows(task, "train")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    name, cursor = f"plain-{time.time_ns()}", 0  # ids of orders are ours, and each is answered once
    with SyncRolloutClient.for_run(run.path) as service:
        version = 1 + max(policy.newest_version for policy in service.policies())  # versions only rise
        publish(service, model, version, run.weights)  # the servers may have those of another trainer
        for step in range(1, steps + 1):
            supply = [rows[number % len(rows)] for number in range(cursor, cursor + 4 * GROUPS)]
            sampling = SamplingParams(temperature=1.0, max_tokens=task.max_turn_tokens)
            service.submit_batch(BatchSpec(f"{name}-{step}", task.name, supply, GROUPS, GROUP_SIZE, sampling=sampling))
            batch = service.wait_batch(f"{name}-{step}")
            cursor += batch.progress.rows_used  # groups of equal rewards were replaced by further rows

            samples = samples_of(batch)
            total = sum(sum(mask) for _, mask, _, _ in samples)  # in DAPO every trained token weighs the same
            for ids, mask, old_logprobs, advantage in samples:
                ratio = (logprobs_of(model, ids) - torch.tensor(old_logprobs[1:])).exp()[torch.tensor(mask[1:])]
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                (-torch.minimum(ratio * advantage, clipped * advantage).sum() / total).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            version += 1
            publish(service, model, version, run.weights)

            rewards = [r.reward for group in batch.groups for r in group.rollouts if r.reward is not None]
            mean = sum(rewards) / max(1, len(rewards))
            print(f"step {step}: reward {mean:.3f}, {total} tokens, weights {version}", flush=True)


if __name__ == "__main__":
    disable_progress_bar()
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
