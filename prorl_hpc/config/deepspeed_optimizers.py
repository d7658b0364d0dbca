"""The optimizers that ``optimizer.type`` of a DeepSpeed JSON can name here, with the parameters of each.

They are torch's, all of which were seen to train and to resume under every ZeRO stage. DeepSpeed's own (Lamb, Lion, Muon, OneBitAdam
and others) are compiled at the start, want gradients that ZeRO has not cut up, or know no resume; torch's others want a closure,
sparse or whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from prorl_hpc.config.trainer_schema import TrainerConfig

_ADAM = frozenset({"betas", "eps", "amsgrad", "torch_adam", "adam_w_mode"})
OPTIMIZERS: dict[str, frozenset[str]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "SGD": frozenset({"momentum", "dampening", "nesterov"}),
    "Adadelta": frozenset({"rho", "eps"}),
    "Adamax": frozenset({"betas", "eps"}),
    "NAdam": frozenset({"betas", "eps", "momentum_decay", "decoupled_weight_decay"}),
    "RAdam": frozenset({"betas", "eps", "decoupled_weight_decay"}),
    "RMSprop": frozenset({"alpha", "eps", "momentum", "centered"}),
    "ASGD": frozenset({"lambd", "alpha", "t0"}),
}
"""Names are matched as DeepSpeed does: Adam and AdamW in any case, the others as torch spells them."""
_ALWAYS = frozenset({"lr", "weight_decay", "foreach"})


def optimizer_parameters(kind: str) -> frozenset[str] | None:
    """Of the optimizer that DeepSpeed finds by this name; None: none that can be used here."""
    adam = {"adam": "Adam", "adamw": "AdamW"}.get(kind.lower(), kind)
    return OPTIMIZERS[adam] | _ALWAYS if adam in OPTIMIZERS else None


def optimizer_problems(section: dict[str, Any], config: TrainerConfig, where: str) -> Iterator[str]:
    """Each as a sentence. ``section``: ``optimizer`` of the user's JSON; ``where``: the setting that it stands in."""
    kind = section.get("type")
    usable = ", ".join(OPTIMIZERS)
    if not kind:
        yield f"{where}: optimizer has no type; leave it out for torch's AdamW, or give one of {usable}"
        return
    known = optimizer_parameters(str(kind))
    if known is None:
        near = get_close_matches(str(kind).lower(), [name.lower() for name in OPTIMIZERS], 1)
        meant = [name for name in OPTIMIZERS if name.lower() in near]
        hint = f"; did you mean {meant[0]}?" if meant else ""
        yield f"{where}: optimizer.type={kind!r} cannot be used here: choose one of {usable}{hint}"
        return
    for name in (section.get("params") or {}).keys() - known:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
        yield f"{where}: 'optimizer.params.{name}' is no parameter of {kind}; {hint}"
    if "betas" not in known and config.adam_betas != TrainerConfig().adam_betas:
        yield (
            f"trainer.adam_betas={config.adam_betas} has no effect with optimizer.type={kind!r} ({where}), which has no betas: "
            f"leave it at {TrainerConfig().adam_betas}, or choose AdamW"
        )
