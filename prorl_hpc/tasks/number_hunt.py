"""A small text game in the form of Gymnasium's environments, to try task=text_env with and to copy from.

The player looks for a secret number; each guess is answered with ``higher`` or ``lower``. It uses nothing of this package.
"""

from __future__ import annotations

import random
import re
from typing import Any


class NumberHunt:
    """``reset(seed=…)`` and ``step("42")``. The reward comes at the end of an episode, in [0, 1]: 1 for the number, else
    half of how near the best guess came. A guess is the last number of the action; one without a number is used up too."""

    def __init__(self, highest: int = 99, guesses: int = 6) -> None:
        self.highest = highest
        self.guesses = guesses
        self.system_prompt = "You hunt a number. Write one guess a turn, as digits."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """``options["secret"]`` fixes the number."""
        secret = (options or {}).get("secret")
        self._secret = random.Random(seed).randint(0, self.highest) if secret is None else int(secret)
        self._made = 0
        self._best = self.highest + 1
        return f"It is between 0 and {self.highest}. You have {self.guesses} guesses.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._made += 1
        numbers = re.findall(r"[0-9]{1,9}", action)
        guess = int(numbers[-1]) if numbers else None
        if guess is not None:
            self._best = min(self._best, abs(guess - self._secret))
        found = guess == self._secret
        over = found or self._made >= self.guesses
        if found:
            answer = "right"
        elif guess is None:
            answer = "that is no number"
        else:
            answer = "higher" if guess < self._secret else "lower"
        info = {"best_distance": self._best, "guesses": self._made}
        return answer, self._score(found) if over else 0.0, found, over and not found, info

    def _score(self, found: bool) -> float:
        return 1.0 if found else 0.5 * max(0.0, 1.0 - self._best / (self.highest + 1))
