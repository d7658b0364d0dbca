"""What `prorl-hpc doctor` says of one thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """``grade``: ok, warn (something will be slower or missing) or fail (runs will not work)."""

    grade: str
    subject: str
    found: str
    cure: str = ""
