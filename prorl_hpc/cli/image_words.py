"""How ``prorl-hpc image`` speaks."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """To whoever looks on; what is asked for goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def size_text(size: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
