"""How soon the LLM servers are free of what a full batch has cancelled."""

from __future__ import annotations

from prorl_hpc.bench.scaling_records import LoadRecord


def freed_s(record: LoadRecord, train_s: float) -> list[float]:
    """Seconds from the end of each batch to the first sample in which no LLM server has a request.

    Only the ``train_s`` seconds in which nothing new is ordered can tell; servers that are still at work at their end count
    with all of them, so that such a value is a lower bound. What the samples lag behind counts too. The last batch is left
    out, since sampling ends with it; so is a batch in whose break no sample was taken.
    """
    if not train_s:
        return []
    found = []
    for batch in record.batches[:-1]:
        spent = [sample for sample in record.samples if batch.ended <= sample.at < batch.ended + train_s]
        free = [sample.at for sample in spent if not any(sample.running.values()) and not any(sample.waiting.values())]
        if spent:
            found.append(free[0] - batch.ended if free else train_s)
    return found
