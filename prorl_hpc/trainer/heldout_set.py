"""What a held-out reward was measured on."""

from __future__ import annotations

import hashlib

import msgspec

from prorl_hpc.messages.batch import BatchSpec


class HeldOutSet(msgspec.Struct, frozen=True):
    """Of one evaluation. Rewards can be compared where this is equal, and only there: settings and data may change at a resume."""

    prompts: int = 0
    samples: int = 0
    """Of each prompt."""
    temperature: float = 0.0
    digest: str = ""
    """Of task, rows and the above."""

    @classmethod
    def of(cls, spec: BatchSpec) -> HeldOutSet:
        sampling = spec.sampling
        what = [spec.task, spec.rows, spec.group_size, sampling.temperature, sampling.top_p, sampling.max_tokens]
        digest = hashlib.sha256(msgspec.json.encode(what, order="deterministic")).hexdigest()[:12]
        return cls(len(spec.rows), spec.group_size, sampling.temperature, digest)
