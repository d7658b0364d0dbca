"""Compute the fixtures of `prorl-hpc bench conformance` with the functions of verl or TRL.

Needs one of them, on a CPU, and nothing of ours; their pins fight with ours, so in an environment of its own:

    python -m venv peers
    peers/bin/pip install torch==2.13.0 verl==0.9.1 ray orjson tensordict==0.10.0 trl==1.16.0
    for peer in verl trl; do
        peers/bin/python scripts/make_conformance_fixtures.py --peer $peer prorl_hpc/bench/conformance_data
    done

The peers compute in float64. Matrices are [B, T]: rows are sequences, the mask tells
which tokens were generated. Settings have the names of group `trainer` of our configuration.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Matrix = list[list[float]]
ROWS, TOKENS = 6, 9
NO_CLIP = 1e9

MASKS = {
    "plain": [[1] * 9, [1] * 7 + [0] * 2, [1] * 5 + [0] * 4, [1] * 9, [1] * 3 + [0] * 6, [1] * 8 + [0]],
    "turns": [
        [1, 1, 0, 0, 1, 1, 1, 0, 1],
        [0, 1, 1, 1, 0, 0, 1, 0, 0],
        [1] * 9,
        [0, 0, 1, 0, 1, 0, 1, 0, 1],
        [1] * 4 + [0] * 5,
        [0] * 8 + [1],
    ],
    "empty_rows": [[1] * 9, [0] * 9, [1] * 5 + [0] * 4, [0] * 9, [0] * 9, [1, 0, 1, 1, 0, 0, 1, 1, 1]],
    "one_token_rows": [
        [1] + [0] * 8,
        [0] * 4 + [1] + [0] * 4,
        [1] * 6 + [0] * 3,
        [0] * 8 + [1],
        [1] + [0] * 8,
        [1] + [0] * 8,
    ],
    "one_token": [[0] * 9, [0] * 3 + [1] + [0] * 5, [0] * 9, [0] * 9, [0] * 9, [0] * 9],
}
"""Of whole sequences that are masked (overlong filtering), of what the environment wrote between turns, of single tokens."""
FULL_MASKS = ("plain", "turns", "one_token_rows")
"""Without empty rows, which TRL counts as sequences."""


def short(x: float) -> float:
    """The nearest number that float32 holds exactly, too, and that is short to write."""
    return round(x * 256) / 256


def matrix(draw: random.Random, spread: float, center: float = 0.0) -> Matrix:
    return [[short(center + draw.gauss(0.0, spread)) for _ in range(TOKENS)] for _ in range(ROWS)]


def loss_inputs(seed: int, mask: str, spread: float = 0.3, cap: float = 30.0) -> dict[str, Any]:
    """``spread``: of the log ratios, of which some lie at ±``cap`` with a spread of 5 and more."""
    draw = random.Random(seed)
    logprobs = [[short(-abs(x)) for x in row] for row in matrix(draw, 1.0, -1.5)]

    def near(width: float) -> Matrix:
        noise = matrix(draw, width)
        return [
            [short(min(a + max(-cap, min(cap, b)), 0.0)) for a, b in zip(*rows, strict=True)]
            for rows in zip(logprobs, noise, strict=True)
        ]

    signs = [1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    return {
        "mask": MASKS[mask],
        "logprobs": logprobs,
        "old_logprobs": near(spread),
        "engine_logprobs": near(spread),
        "reference_logprobs": near(0.5),
        "advantages": [[short(sign * draw.uniform(0.3, 2.0))] * TOKENS for sign in signs],
        "entropy": [[abs(x) for x in row] for row in matrix(draw, 1.0)],
        "values": matrix(draw, 1.0),
        "old_values": matrix(draw, 1.0),
        "returns": matrix(draw, 1.0),
    }


WITH_GRADIENT = ("logprobs", "entropy", "values")
ALWAYS = ("mask", "logprobs", "old_logprobs", "advantages")
NEEDED = {
    "correction": ["engine_logprobs"],
    "kl_coefficient": ["reference_logprobs"],
    "entropy_coefficient": ["entropy"],
    "value_coefficient": ["values", "old_values", "returns"],
}


def loss_case(name: str, peer: Any, inputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    used = [
        *ALWAYS,
        *(x for setting, names in NEEDED.items() if settings.get(setting, "none") not in ("none", 0) for x in names),
    ]
    inputs = {name: inputs[name] for name in used}
    tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in inputs.items()}
    for leaf in WITH_GRADIENT:
        if leaf in tensors:
            tensors[leaf].requires_grad_()
    loss = peer(tensors, settings)
    loss.backward()
    gradients = {leaf: tensors[leaf].grad.tolist() for leaf in WITH_GRADIENT if leaf in tensors}
    return {
        "name": name,
        "kind": "loss",
        "settings": settings,
        "inputs": inputs,
        "expected": {"loss": loss.item(), "gradients": gradients},
    }


# verl


def verl_loss(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    """The actor's loss as verl's workers put it together, and the critic's."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    mode = settings["aggregation"].replace("_", "-")
    scale = {"loss_scale_factor": settings["aggregation_tokens"]} if mode.endswith("norm") else {}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=settings["clip_low"],
        clip_ratio_high=settings["clip_high"],
        clip_ratio_c=settings.get("dual_clip", 0.0) or NO_CLIP,
    )
    config.global_batch_info.update(scale)
    mask, old, now = tensors["mask"], tensors["old_logprobs"], tensors["logprobs"]
    weights = None
    correction = settings.get("correction", "none")
    if correction != "none":
        cap = settings["correction_cap"]
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
            old - tensors["engine_logprobs"],
            mask,
            "sequence" if correction.startswith("sequence") else "token",
            f"1e-30_{cap}" if correction.endswith("mask") else cap,
        )
    policy_loss = {"clip": "vanilla", "sequence_clip": "gspo", "cispo": "cispo"}[settings["policy_loss"]]
    compute = core_algos.get_policy_loss_fn(policy_loss)
    loss, _ = compute(old, now, tensors["advantages"], mask, mode, config, weights)
    if settings.get("kl_coefficient"):
        kl = core_algos.kl_penalty(now, tensors["reference_logprobs"], "k3")
        loss = loss + settings["kl_coefficient"] * core_algos.agg_loss(kl, mask, mode, **scale)
    if settings.get("entropy_coefficient"):
        loss = loss - settings["entropy_coefficient"] * core_algos.agg_loss(tensors["entropy"], mask, mode, **scale)
    if settings.get("value_coefficient"):
        value_loss, _ = core_algos.compute_value_loss(
            tensors["values"],
            tensors["returns"],
            tensors["old_values"],
            mask,
            settings["value_clip"] or NO_CLIP,
            mode,
            **scale,
        )
        loss = loss + 2 * settings["value_coefficient"] * value_loss  # verl's has ½ in it
    return loss


AGGREGATIONS: list[dict[str, Any]] = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum_norm", "aggregation_tokens": 9},
]
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def verl_cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for policy_loss, clip in (
        ("clip", CLIP),
        ("sequence_clip", {"clip_low": 0.05, "clip_high": 0.08}),
        ("cispo", CLIP),
    ):
        for mask in MASKS:
            for aggregation in AGGREGATIONS:
                settings = {"policy_loss": policy_loss, **clip, **aggregation}
                name = f"{policy_loss}, {aggregation['aggregation']}, {mask}"
                found.append(loss_case(name, verl_loss, loss_inputs(len(found), mask), settings))
        for aggregation in AGGREGATIONS[::2]:
            settings = {"policy_loss": policy_loss, **clip, **aggregation}
            name = f"{policy_loss}, {aggregation['aggregation']}, huge ratios"
            found.append(loss_case(name, verl_loss, loss_inputs(len(found), "turns", 12.0), settings))
    base = {"policy_loss": "clip", **CLIP, "aggregation": "token_mean"}
    extras: dict[str, dict[str, Any]] = {
        "dual clip": {"dual_clip": 1.3},
        "k3": {"kl_coefficient": 0.1},
        "entropy": {"entropy_coefficient": 0.01},
        "value": {"value_coefficient": 0.5, "value_clip": 0.2},
        "unclipped value": {"value_coefficient": 0.3, "value_clip": 0.0},
        "everything": {
            "dual_clip": 1.5,
            "correction": "truncate",
            "correction_cap": 1.1,
            "kl_coefficient": 0.05,
            "entropy_coefficient": 0.02,
            "value_coefficient": 0.4,
            "value_clip": 0.3,
        },
    }
    for correction in ("truncate", "mask", "sequence_truncate", "sequence_mask"):
        extras[correction] = {"correction": correction, "correction_cap": 1.2}
        extras[f"gspo, {correction}"] = {
            "policy_loss": "sequence_clip",
            "correction": correction,
            "correction_cap": 1.2,
        }
    for name, extra in extras.items():
        for mask in ("turns", "empty_rows"):
            found.append(loss_case(f"{name}, {mask}", verl_loss, loss_inputs(len(found), mask), base | extra))
    for name in ("dual clip", "truncate", "sequence_mask"):
        inputs = loss_inputs(len(found), "turns", 12.0)
        found.append(loss_case(f"{name}, huge ratios", verl_loss, inputs, base | extras[name]))
    return found + verl_advantages() + verl_gae()


def verl_advantages() -> list[dict[str, Any]]:
    from verl.trainer.ppo import core_algos

    functions = {
        "group": core_algos.compute_grpo_outcome_advantage,
        "group_mean": lambda *x: core_algos.compute_grpo_outcome_advantage(*x, norm_adv_by_std_in_grpo=False),
        "leave_one_out": core_algos.compute_rloo_outcome_advantage,
        "batch": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    batches = {
        "two answers": ([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0, 1, 1]),
        "one of three": ([0.25, -1.5, 3.0, 0.0, 0.0, 1.0], [7, 7, 7, 2, 2, 2]),
        "large rewards": ([1e4, -2e4, 3e4, 1.0, 2.0, 4.0], [0, 1, 0, 1, 0, 1]),
    }
    found: list[dict[str, Any]] = []
    for advantage, compute in functions.items():
        for batch, (rewards, groups) in batches.items():
            for mask in ("plain", "turns", "one_token_rows"):
                where = torch.tensor(MASKS[mask], dtype=torch.float64)
                # A reward stands at the sequence's last token.
                scores = torch.zeros_like(where)
                for i, row in enumerate(MASKS[mask]):
                    scores[i, max(t for t, m in enumerate(row) if m)] = rewards[i]
                advantages, _ = compute(scores, where, groups)
                first = [row.index(1) for row in MASKS[mask]]
                found.append(
                    {
                        "name": f"{advantage}, {batch}, {mask}",
                        "kind": "advantages",
                        "settings": {"advantage": advantage},
                        "inputs": {"rewards": rewards, "groups": groups, "mask": MASKS[mask]},
                        "expected": {"advantages": [advantages[i, t].item() for i, t in enumerate(first)]},
                    }
                )
    return found


def verl_gae() -> list[dict[str, Any]]:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    found: list[dict[str, Any]] = []
    for mask in ("plain", "turns", "one_token_rows", "empty_rows"):
        for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (1.0, 0.0)):
            draw = random.Random(len(found))
            where = torch.tensor(MASKS[mask], dtype=torch.float64)
            rewards, values = matrix(draw, 1.0), matrix(draw, 0.5)
            advantages, returns = compute_gae_advantage_return(
                torch.tensor(rewards, dtype=torch.float64) * where,
                torch.tensor(values, dtype=torch.float64),
                where,
                gamma,
                lam,
            )
            found.append(
                {
                    "name": f"gae {gamma:g} {lam:g}, {mask}",
                    "kind": "gae",
                    "settings": {"gae_gamma": gamma, "gae_lambda": lam},
                    "inputs": {"rewards": rewards, "values": values, "mask": MASKS[mask]},
                    "expected": {"advantages": (advantages * where).tolist(), "returns": (returns * where).tolist()},
                }
            )
    return found


# TRL


class _OneProcess:
    """Of accelerate, what the loss asks for."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x


def trl_loss(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    """GRPOTrainer._compute_loss, with given logprobs in place of a model."""
    from trl import GRPOTrainer

    mask = tensors["mask"]
    entropy = tensors.get("entropy", torch.zeros_like(mask))
    sequence = settings["policy_loss"] == "sequence_clip"
    by_aggregation = {"token_mean": "dapo", "seq_mean_token_mean": "grpo", "seq_mean_token_sum_norm": "dr_grpo"}
    cispo = settings["policy_loss"] == "cispo"
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (tensors["logprobs"], entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if sequence else "token",
        beta=settings.get("kl_coefficient", 0.0),
        loss_type="cispo" if cispo else by_aggregation[settings["aggregation"]],
        epsilon_low=settings["clip_low"],
        epsilon_high=settings["clip_high"] + (1.0 if cispo else 0.0),
        args=SimpleNamespace(
            delta=settings.get("dual_clip") or None, steps_per_generation=1, use_bias_correction_kl=False
        ),
        use_vllm="engine_logprobs" in tensors,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=settings.get("aggregation_tokens", 0),
        accelerator=_OneProcess(),
        _entropy_bonus_enabled="entropy" in tensors,
        use_adaptive_entropy=False,
        entropy_coef=settings.get("entropy_coefficient", 0.0),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old_logprobs"],
        "ref_per_token_logps": tensors.get("reference_logprobs"),
        "num_items_in_batch": mask.sum(),
    }
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def trl_cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    names = {"token_mean": "dapo", "seq_mean_token_mean": "grpo", "seq_mean_token_sum_norm": "dr_grpo"}
    for aggregation in (AGGREGATIONS[0], AGGREGATIONS[2], AGGREGATIONS[3]):
        loss = names[aggregation["aggregation"]]
        for extra, more in (("", {}), (", delta", {"dual_clip": 1.5}), (", beta", {"kl_coefficient": 0.04})):
            for mask in FULL_MASKS:
                settings = {"policy_loss": "clip", **CLIP, **aggregation, **more}
                found.append(loss_case(f"{loss}{extra}, {mask}", trl_loss, loss_inputs(len(found), mask), settings))
    token_mean, sequence_mean = AGGREGATIONS[0], AGGREGATIONS[2]
    others: dict[str, dict[str, Any]] = {
        "gspo": {"policy_loss": "sequence_clip", "clip_low": 0.05, "clip_high": 0.08, **sequence_mean},
        "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.28, **token_mean},
        "entropy": {"policy_loss": "clip", **CLIP, **token_mean, "entropy_coefficient": 0.01},
    }
    for name, settings in others.items():
        for mask in FULL_MASKS:
            found.append(loss_case(f"{name}, {mask}", trl_loss, loss_inputs(len(found), mask), settings))
    for mask in ("empty_rows", "one_token"):
        settings = {"policy_loss": "clip", **CLIP, **token_mean}
        found.append(loss_case(f"dapo, {mask}", trl_loss, loss_inputs(len(found), mask), settings))
    return [*found, trl_overlong(100, 20), trl_overlong(50, 50)]


def trl_overlong(max_tokens: int, cache_tokens: int) -> dict[str, Any]:
    from trl.rewards import get_soft_overlong_punishment

    lengths = [0, 1, 49, 50, 79, 80, 81, 90, 99, 100, 101, 500]
    punish = get_soft_overlong_punishment(max_tokens, cache_tokens)
    return {
        "name": f"soft overlong punishment {max_tokens} {cache_tokens}",
        "kind": "overlong",
        "settings": {"max_response_tokens": max_tokens, "soft_overlong_cache_tokens": cache_tokens},
        "inputs": {"lengths": lengths},
        "expected": {"punishments": punish([[0] * n for n in lengths])},
    }


def rounded(found: Any) -> Any:
    """To ten digits."""
    if isinstance(found, dict):
        return {name: rounded(x) for name, x in found.items()}
    return [rounded(x) for x in found] if isinstance(found, list) else float(f"{found:.10g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", choices=("verl", "trl"), required=True)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    made = {
        "peer": args.peer,
        "version": importlib.metadata.version(args.peer),
        "torch": torch.__version__,
        "made_by": "scripts/make_conformance_fixtures.py",
        "cases": verl_cases() if args.peer == "verl" else trl_cases(),
    }
    path = args.directory / f"{args.peer}.json"
    for case in made["cases"]:
        case["expected"] = rounded(case["expected"])
    cases = ",\n".join(json.dumps(case, separators=(",", ":"), allow_nan=False) for case in made.pop("cases"))
    path.write_text(json.dumps(made)[:-1] + f', "cases": [\n{cases}\n]}}\n')
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
