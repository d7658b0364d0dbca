"""Looking up between the layers of a model: where a single rank can leave off within a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def call_at_layers(lm: nn.Module, check: Callable[[], None]) -> None:
    """Call ``check`` before each layer's forward and during the backward pass after each layer's gradient."""

    def before(module: nn.Module, inputs: Any) -> None:
        check()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: check())

    lists = [m for m in lm.modules() if isinstance(m, nn.ModuleList)]
    for layer in max(lists, key=len, default=nn.ModuleList()):
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
