"""Environments that go right and wrong, played by the tests of text_env in processes of their own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import Any


class Countdown:
    """Ends after ``steps``, each worth 1, and repeats the action."""

    def __init__(self, steps: int = 3) -> None:
        self.left = steps

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        print("noise on standard output")
        self.last_reward = (options or {}).get("last_reward", 1.0)
        return f"{self.left} left", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        print('{"value": "not an answer"}')
        self.left -= 1
        over = self.left == 0
        info = {"left": self.left, "nan": float("nan"), "note": "text", "list": [1], "ok": True}
        return f"you did [{action}]", self.last_reward if over else 1.0, over, False, info


class Old:
    """As before Gym 0.26: seed(), reset() gives the observation alone, step a tuple of four."""

    def seed(self, seed: int) -> None:
        self.secret = seed

    def reset(self) -> str:
        return f"seeded with {self.secret}, drew {random.randint(0, 10**9)}"

    def step(self, action: str) -> tuple[str, int, bool, dict[str, Any]]:
        return "", 2, action == "stop", {"TimeLimit.truncated": True} if action == "late" else {}


class Broken(Countdown):
    """Its first step does what ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def step(self, action: str) -> Any:
        if self.how == "raise":
            raise KeyError("no such door")
        if self.how == "exit":
            print("out of luck", file=sys.stderr)
            os._exit(3)
        if self.how == "hang":
            while True:
                time.sleep(0.01)
        if self.how == "child":
            if os.fork() == 0:
                time.sleep(600)
            while True:
                time.sleep(0.01)
        return {
            "numbers": (42, 0.0, False, False, {}),
            "three": ("a", 0.0, False),
            "reward": ("a", "much", False, False, {}),
            "nan": ("a", float("nan"), False, False, {}),
        }[self.how]


class Daemon(Countdown):
    """Its step starts a process that leaves its parent and session, and says which."""

    def step(self, action: str) -> Any:
        if action == "exit":
            os._exit(3)
        start = ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"]
        daemon = subprocess.run(start, stdout=subprocess.PIPE, text=True).stdout
        return daemon.strip(), 0.0, False, False, {}


class Chatter(Countdown):
    """Prints much."""

    def step(self, action: str) -> Any:
        if action == "exit":
            print("last words", flush=True)
            os._exit(3)
        print("x" * (4 << 20), flush=True)
        return "", 0.0, False, False, {}


class NoStep:
    def reset(self) -> str:
        return ""
