"""Run by path with the Python of TRL's own environment: optimizer steps of GRPOTrainer on a fixed batch, timed.

``--asked`` is what trainer_steps.py is asked, and ``--out`` gets what it answers. Nothing is generated: the trainer's
rollout hook returns the batch's completions with their logprobs. A step's time is from its first micro-batch to the end
of the optimizer's step, less that of making the batch (``_prepare_inputs``: the hook, rewards, advantages, tensors).
"""

# mypy: ignore-errors
# (TRL is not in the environment that is checked.)

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--asked", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--rows", type=int, required=True, help="of a micro-batch")
parser.add_argument("--learning-rate", type=float, required=True)
parser.add_argument("--warm-up-share", type=int, required=True)
ARGS = parser.parse_args()
ASKED = json.loads(ARGS.asked.read_text())
BATCH = json.loads(Path(ASKED["batch"]).read_text())

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# TRL would load what it finds of vLLM, which takes memory and is of no use here.
sys.modules["vllm"] = None

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

torch.set_num_threads(ASKED["threads"])


class FixedRollouts:
    """The hook. Its first call gives short completions, to warm up with."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts, trainer):
        share = ARGS.warm_up_share if self.calls == 0 else 1
        self.calls += 1
        found = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "fixed_reward": []}
        seen = {}
        for prompt in prompts:
            group = int(prompt)
            sample = seen[group] = seen.get(group, -1) + 1
            ids = BATCH["completions"][group][sample]
            length = max(1, len(ids) // share)
            found["prompt_ids"].append(BATCH["prompts"][group])
            found["completion_ids"].append(ids[:length])
            found["logprobs"].append(BATCH["logprobs"][group][sample][:length])
            found["fixed_reward"].append(BATCH["rewards"][group][sample])
        return found


def fixed_reward(completions, fixed_reward, **_):
    return fixed_reward


class TimedTrainer(GRPOTrainer):
    preparing_s = 0.0

    def _prepare_inputs(self, inputs):
        began = time.perf_counter()
        try:
            return super()._prepare_inputs(inputs)
        finally:
            self.preparing_s += time.perf_counter() - began


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds, self.norms = [], []
        self.trainer = None

    def on_step_begin(self, *args, **kwargs):
        self.trainer.preparing_s = 0.0
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.began - self.trainer.preparing_s)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


def main() -> None:
    groups, samples = len(BATCH["prompts"]), len(BATCH["completions"][0])
    config = GRPOConfig(
        output_dir=ASKED["directory"],
        use_cpu=True,
        bf16=False,
        max_steps=1 + ASKED["steps"],
        per_device_train_batch_size=ARGS.rows,
        gradient_accumulation_steps=groups * samples // ARGS.rows,
        num_generations=samples,
        max_completion_length=max(len(c) for group in BATCH["completions"] for c in group),
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        mask_truncated_completions=False,
        learning_rate=ARGS.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=ASKED["gradient_checkpointing"],
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    clock = Clock()
    trainer = TimedTrainer(
        model=ASKED["model"],
        reward_funcs=fixed_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": str(group)} for group in range(groups)]),
        processing_class=AutoTokenizer.from_pretrained(ASKED["model"]),
        rollout_func=FixedRollouts(),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()
    status = Path("/proc/self/status").read_text()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    versions = {"TRL": trl, "torch": torch, "transformers": transformers}
    taken = {
        "seconds": clock.seconds[1:],
        "grad_norms": clock.norms[1:],
        "peak_mib": peak_kib / 1024,
        "software": ", ".join(f"{name} {module.__version__}" for name, module in versions.items()),
    }
    ARGS.out.write_text(json.dumps(taken))


main()
