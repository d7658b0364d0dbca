"""From one weight version per token to spans."""

from __future__ import annotations

from collections.abc import Sequence

from prorl_hpc.messages.inference import VersionSpan


def spans_of(versions: Sequence[int]) -> list[VersionSpan]:
    """Spans of equal versions over a sequence that has one per token."""
    spans: list[VersionSpan] = []
    for i, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, i + 1)
        else:
            spans.append(VersionSpan(version, i, i + 1))
    return spans
