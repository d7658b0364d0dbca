"""What a run's algorithm is made of, in a line."""

from __future__ import annotations

from prorl_hpc.config.schema import TrainerConfig


def algorithm_told(trainer: TrainerConfig) -> str:
    """The pieces that are on, by the names of their settings; presets are sets of these."""
    told = [
        f"advantage={trainer.advantage}",
        f"policy_loss={trainer.policy_loss} (clip_low={trainer.clip_low:g}, clip_high={trainer.clip_high:g})",
        f"aggregation={trainer.aggregation}",
        f"proximal={trainer.proximal}",
    ]
    if trainer.advantage == "gae":
        told.append(f"gae_gamma={trainer.gae_gamma:g}, gae_lambda={trainer.gae_lambda:g}")
    if trainer.correction != "none":
        told.append(f"correction={trainer.correction} (correction_cap={trainer.correction_cap:g})")
    for name in ("dual_clip", "kl_coefficient", "entropy_coefficient", "soft_overlong_cache_tokens", "staleness"):
        if value := getattr(trainer, name):
            told.append(f"{name}={value:g}")
    told += [name for name in ("dynamic_sampling", "overlong_filtering") if getattr(trainer, name)]
    updates = trainer.epochs * trainer.mini_batches
    return ", ".join(f"`{piece}`" for piece in told) + f"; {updates} {'update' if updates == 1 else 'updates'} per step"
