"""How soon the LLM servers are free of what a full batch has cancelled."""

from __future__ import annotations

from prorl_hpc.bench.scaling_records import LoadRecord


def freed_s(record: LoadRecord, train_s: float) -> list[float]:
    """Seconds from the end of each batch to the sample from which on no LLM server has a request.

    Only the ``train_s`` seconds in which nothing new is ordered can tell; servers that are still at work at their end count
    with all of them, so that such a value is a lower bound. What the samples lag behind counts too. The last batch is left
    out, since sampling ends with it; so is a batch in whose break no sample was taken.
    """
    if not train_s:
        return []
    found = []
    for batch in record.batches[:-1]:
        spent = [sample for sample in record.samples if batch.ended <= sample.at < batch.ended + train_s]
        at_work = [n for n, sample in enumerate(spent) if any((*sample.running.values(), *sample.waiting.values()))]
        free = at_work[-1] + 1 if at_work else 0
        if spent:
            found.append(spent[free].at - batch.ended if free < len(spent) else train_s)
    return found
