"""The states of all random number generators that training may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """Of torch (CPU and this rank's GPU), Python and numpy."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where ``random_state`` was taken."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
