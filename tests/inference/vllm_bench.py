"""Engines around fake vLLM servers."""

from __future__ import annotations

import sys
from pathlib import Path

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.vllm_engine import VllmEngine
from prorl_hpc.inference.vllm_process import VllmProcess
from prorl_hpc.inference.vllm_settings import VllmSettings

FAKE = Path(__file__).with_name("fake_vllm.py")


class FakeSettings(VllmSettings):
    modes: tuple[str, ...] = ()

    def command(self) -> list[str]:
        return [sys.executable, str(FAKE), str(self.socket), *self.modes]


class Bench:
    """Makes engines around fake servers, and knows the processes of each start."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.modes: list[tuple[str, ...]] = []
        self.processes: list[VllmProcess] = []

    def engine(
        self,
        *modes_of_starts: tuple[str, ...],
        restarts: int = 0,
        start_timeout_s: float = 60,
        max_context_tokens: int = 64,
    ) -> VllmEngine:
        self.modes = list(modes_of_starts) or [()]
        config = EngineConfig(start_timeout_s=start_timeout_s)

        def make() -> VllmProcess:
            d = self.directory
            settings = FakeSettings(
                config, d, max_context_tokens, d / "v.sock", d / "cache", [], weight_secret=d / "stream.secret"
            )
            modes = self.modes.pop(0) if len(self.modes) > 1 else self.modes[0]
            object.__setattr__(settings, "modes", modes)
            self.processes.append(VllmProcess(settings, d / "vllm.log"))
            return self.processes[-1]

        return VllmEngine(make, "inference-0", max_context_tokens, restarts)
