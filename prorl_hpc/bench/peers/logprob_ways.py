"""Run by path: logprobs and entropies of every token of some rows, forward and backward, in one of two ways.

``chunked`` is the trainer's policy; ``plain`` has the model make all logits and takes log_softmax of them. The model is cut
down to one layer, so that what is measured is the vocabulary's part. Writes one JSON object to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prorl_hpc.bench.trainer_steps import peak_mib
from prorl_hpc.trainer.policy import Policy, load_policy


def chunked(policy: Policy, ids: Tensor) -> Tensor:
    rows, length = ids.shape
    sources = (torch.arange(rows)[:, None] * length + torch.arange(length - 1)).flatten()
    positions = torch.arange(length).repeat(rows, 1)
    logprobs: Tensor = policy(ids, positions, None, sources, ids[:, 1:].flatten())[0]
    return logprobs


def plain(policy: Policy, ids: Tensor) -> Tensor:
    logits = policy.lm(input_ids=ids, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        (logprobs.exp() * logprobs).sum(-1).neg()  # the entropy, which the other way gives too
    return logprobs.gather(-1, ids[:, 1:, None]).flatten()


WAYS: dict[str, Callable[[Policy, Tensor], Tensor]] = {"chunked": chunked, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = load_policy(args.model, torch.float32, gradient_checkpointing=False)
    del policy.lm.base_model.layers[1:]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, policy.lm.config.vocab_size, (args.rows, args.length), generator=draw)
    args.out.write_text(json.dumps(measured(WAYS[args.way], policy, ids, args.repeats)))


def measured(way: Callable[[Policy, Tensor], Tensor], policy: Policy, ids: Tensor, repeats: int) -> dict[str, Any]:
    way(policy, ids[:1, :8]).sum().backward()  # the gradients' memory is both ways' own
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: loading the model had one of its own
    before, seconds = peak_mib(), []
    for _ in range(repeats):
        policy.zero_grad(set_to_none=False)
        began = time.perf_counter()
        logprobs = way(policy, ids)
        logprobs.mean().backward()
        seconds.append(time.perf_counter() - began)
    gradient = float(policy.lm.get_output_embeddings().weight.grad.norm())
    return {
        "seconds": seconds,
        "before_mib": before,
        "peak_mib": peak_mib(),
        "logprobs": logprobs.tolist(),
        "gradient": gradient,
    }


main()
