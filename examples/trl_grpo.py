"""TRL's GRPOTrainer on rollouts of a service that runs: TRL's loss, optimizer and logs; our sandboxes, turns and rewards.

    python -m prorl_hpc serve experiment=quick --detach               # any model and task; this one needs no GPU
    python -m prorl_hpc.bench.peer_environment trl-environment        # TRL 1.16 beside this package
    trl-environment/bin/python examples/trl_grpo.py runs/latest 8     # 8 steps

TRL's hook is ``rollout_func`` (experimental there). docs/bring-your-own-trainer.md says what a trainer must keep to.
"""

import shutil
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.messages.inference import WeightProbe, WeightUpdate
from prorl_hpc.messages.rollout import RolloutResult, RolloutSpec, SamplingParams, Status
from prorl_hpc.service.sync_client import SyncRolloutClient
from prorl_hpc.tasks.dataset import load_rows

GROUPS, GROUP_SIZE, LEARNING_RATE = 4, 8, 1e-3
PROBE = list(range(10, 34))  # any ids that the model has: the servers must agree on their logprobs
PROBE_TOLERANCE = 0.05  # nats, for float32 on both sides; bfloat16 moves single tokens by some tenths


class ServiceRollouts:
    """A ``rollout_func``: one rollout of the service for each prompt, made by the weights that TRL has at that moment."""

    def __init__(self, service: SyncRolloutClient, run: RunDirectory) -> None:
        self.service = service
        self.run = run
        self.task = run.load_config().task
        self.rows = load_rows(self.task, "train")
        self.name = f"trl-{time.time_ns()}"  # ids of orders are ours, and each is answered once
        self.calls = 0
        self.version = max(policy.newest_version for policy in service.policies())  # versions only rise
        self.published_at = -1

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """``prompts`` has each prompt GROUP_SIZE times, and wants a completion for each entry, in this order."""
        if trainer.state.global_step != self.published_at:
            self.publish(trainer)
        self.calls += 1
        batch = f"{self.name}-{self.calls}-rank{trainer.accelerator.process_index}"
        orders = [
            RolloutSpec(
                rollout_id=f"{batch}-{number}",
                task=self.task.name,
                row=self.rows[int(prompt)],
                group_id=f"{self.name}-{self.calls}-row{prompt}",
                sample=number,
                sampling=SamplingParams(temperature=trainer.temperature, max_tokens=self.task.max_turn_tokens),
            )
            for number, prompt in enumerate(prompts)
        ]
        self.service.submit_rollouts(orders)
        samples = [as_completion(self.service.wait_rollout(o.rollout_id), trainer.eos_token_ids[0]) for o in orders]
        return {field: [sample[field] for sample in samples] for field in samples[0]}

    def publish(self, trainer: GRPOTrainer) -> None:
        """Every server has TRL's weights, and shows it by the probe, before a rollout is ordered from them. (A model in
        parts, FSDP or ZeRO-3, must be gathered first.)"""
        self.version, self.published_at = self.version + 1, trainer.state.global_step
        model = trainer.accelerator.unwrap_model(trainer.model)
        if trainer.accelerator.is_main_process:
            directory = self.run.weights / f"version-{self.version}"
            model.save_pretrained(directory)  # safetensors with Hugging Face names, where the servers see them
            paths = [str(path) for path in sorted(directory.glob("*.safetensors"))]
            tokens = torch.tensor([PROBE], device=model.device)
            with torch.no_grad():
                logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
            probe = WeightProbe(PROBE, logprobs.tolist(), PROBE_TOLERANCE)
            answers = self.service.update_weights(WeightUpdate(self.version, paths, probe))
            if wrong := [answer for answer in answers if answer.error and not answer.lost]:
                raise SystemExit(f"weights {self.version} did not reach every server: {wrong}")
            shutil.rmtree(self.run.weights / f"version-{self.version - 1}", ignore_errors=True)
        trainer.accelerator.wait_for_everyone()


def as_completion(rollout: RolloutResult, filler: int) -> dict[str, Any]:
    """All that follows the prompt is TRL's completion; ``env_mask`` is 1 where the policy wrote and 0 where the
    environment did, which TRL keeps out of the loss. Further fields reach the reward functions.

    A rollout that failed has no reward: None keeps it out of its group's mean, and its one token is masked. TRL has one
    sequence for each rollout, so branches of an outside agent's conversation are left out."""
    ids, mask, logprobs = (getattr(rollout.trajectory, name) for name in ("token_ids", "loss_mask", "logprobs"))
    if rollout.status is not Status.DONE or not any(mask):
        return {"prompt_ids": [filler], "completion_ids": [filler], "logprobs": [0.0], "env_mask": [0], "score": None}
    start = mask.index(True)
    return {
        "prompt_ids": ids[:start],
        "completion_ids": ids[start:],
        "logprobs": logprobs[start:],
        "env_mask": [int(wrote) for wrote in mask[start:]],
        "score": rollout.reward,
    }


def reward(score: list[float | None], **_: Any) -> list[float | None]:
    """The task's, as its EVAL stage gave it."""
    return score


def main(run_directory: str, steps: int) -> None:
    run = RunDirectory.open(run_directory)
    path = run.load_config().model.path
    with SyncRolloutClient.for_run(run.path) as service:
        rollouts = ServiceRollouts(service, run)
        settings = GRPOConfig(
            output_dir=str(run.path / "trl"),
            max_steps=steps,
            per_device_train_batch_size=GROUP_SIZE,
            gradient_accumulation_steps=GROUPS,  # a step has GROUPS × GROUP_SIZE rollouts on one process
            num_generations=GROUP_SIZE,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            temperature=1.0,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=path,
            args=settings,
            processing_class=AutoTokenizer.from_pretrained(path),
            # The rows stay here: TRL hands prompts around, and ours are the numbers of rows.
            train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(len(rollouts.rows))]),
            reward_funcs=reward,
            rollout_func=rollouts,
        )
        trainer.train()
        rollouts.publish(trainer)
        print(f"{steps} steps, weights {rollouts.version}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
