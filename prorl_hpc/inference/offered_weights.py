"""Whether the weights of an update can be had from here, before anything is paused for them."""

from __future__ import annotations

from pathlib import Path

from prorl_hpc.messages.errors import InferenceError, TransportError
from prorl_hpc.messages.inference import WeightUpdate
from prorl_hpc.transport.weight_stream import listing_of, read_key


def check_offer(update: WeightUpdate, secret: Path | None, name: str) -> None:
    """``secret``: the file with which a stream is asked for; ``name`` of the server, for messages. Raises
    InferenceError. Waits for the trainer: not for an event loop."""
    if update.source is not None:
        if secret is None:
            raise InferenceError(
                f"{name}: weights {update.version} are streamed, and this server has no secret to ask with"
            )
        try:
            listing_of(update.source, read_key(secret))
        except (OSError, TransportError) as error:
            raise InferenceError(f"{name}: weights {update.version} cannot be had from the trainer: {error}") from error
        return
    missing = [path for path in update.paths if not Path(path).is_file()]
    if missing or not update.paths:
        raise InferenceError(f"{name}: weights {update.version} are not here: {missing or 'no path given'}")
