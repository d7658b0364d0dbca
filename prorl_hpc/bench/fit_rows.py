"""From the records of requests to the rows of a least-squares fit.

Seconds of a request in the engine = first_token_s + first_token_s_per_1k · uncached prompt tokens / 1000
+ first_token_s_per_request · others at its start + token_s · generated tokens + token_s_per_request · generated tokens ·
mean others + stall_s_per_1k · uncached prompt tokens of requests that began meanwhile / 1000: linear in what is looked for,
and what the scripted engine does (config.script_settings).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from prorl_hpc.inference.request_records import RequestRecord
from prorl_hpc.messages.inference import FinishReason

Floats = npt.NDArray[np.float64]

COLUMNS = (
    "first_token_s",
    "first_token_s_per_1k",
    "first_token_s_per_request",
    "token_s",
    "token_s_per_request",
    "stall_s_per_1k",
)
SECONDS, UNCACHED, GENERATED, RUNNING = "seconds", "uncached prompt tokens", "generated tokens", "requests at once"


class Rows:
    """``features``: one row for each request that ended by itself, one column for each of COLUMNS; ``seconds``: of each."""

    def __init__(self, features: Floats, seconds: Floats, spread: dict[str, Floats]) -> None:
        self.features, self.seconds, self.spread = features, seconds, spread
        """``spread``: UNCACHED, GENERATED and RUNNING of each request."""

    def __len__(self) -> int:
        return len(self.seconds)


def rows_of(servers: Iterable[list[RequestRecord]]) -> Rows:
    """Requests of one server hold up one another; those that were aborted or failed do so too, but are no rows."""
    parts = [part for records in servers if len(part := _server_rows(records))]
    table = np.concatenate(parts) if parts else np.empty((0, len(COLUMNS) + 4))
    names = (SECONDS, UNCACHED, GENERATED, RUNNING)
    columns = dict(zip(names, table[:, len(COLUMNS) :].T, strict=True))
    return Rows(table[:, : len(COLUMNS)], columns.pop(SECONDS), columns)


def _server_rows(records: list[RequestRecord]) -> Floats:
    """COLUMNS, then seconds, uncached, generated, running."""
    by_start = sorted(records, key=lambda record: record.began)
    starts = np.array([record.began for record in by_start])
    uncached = np.array([_uncached(record) for record in by_start], dtype=float)
    before = np.concatenate([[0.0], np.cumsum(uncached)])
    rows = []
    for place, record in enumerate(by_start):
        if record.reason not in (FinishReason.STOP, FinishReason.LENGTH) or record.seconds <= 0:
            continue
        last = int(np.searchsorted(starts, record.began + record.seconds))
        meanwhile = before[max(last, place + 1)] - before[place + 1]
        rows.append(
            [
                1.0,
                uncached[place] / 1000,
                record.running_at_start - 1,
                record.generated_tokens,
                record.generated_tokens * max(0.0, record.running - 1),
                meanwhile / 1000,
                record.seconds,
                uncached[place],
                record.generated_tokens,
                record.running,
            ]
        )
    return np.array(rows, dtype=float)


def _uncached(record: RequestRecord) -> int:
    return record.prompt_tokens - record.cached_tokens


def non_negative_least_squares(features: Floats, wanted: Floats) -> Floats:
    """argmin over x ≥ 0 of |features · x − wanted|. The best one is the least-squares solution of some of the columns
    (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23); with so few columns all choices are tried."""
    count = features.shape[1]
    gram, moment = features.T @ features, features.T @ wanted
    best, least = np.zeros(count), 0.0
    for choice in range(1, 2**count):
        columns = [column for column in range(count) if choice >> column & 1]
        some = np.linalg.lstsq(gram[np.ix_(columns, columns)], moment[columns], rcond=None)[0]
        if (some < 0).any():
            continue
        x = np.zeros(count)
        x[columns] = some
        error = float(x @ gram @ x - 2 * x @ moment)
        if error < least:
            best, least = x, error
    return best
