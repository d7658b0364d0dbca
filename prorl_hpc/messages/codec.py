"""msgpack on the wire between our processes, JSON towards people and HTTP clients."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from prorl_hpc.messages.errors import TransportError

SCHEMA_VERSION = b"prorl1"

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> list[bytes]:
    """Two ZeroMQ frames: the schema version, and the message in msgpack."""
    return [SCHEMA_VERSION, _encoder.encode(message)]


def encode_many(messages: Iterable[Any]) -> list[bytes]:
    """The frames of several messages in one: the schema version, then each message in msgpack."""
    return [SCHEMA_VERSION, *map(_encoder.encode, messages)]


class Decoder(Generic[T]):
    """Decodes the frames of one direction's union of message types; raises TransportError."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def __call__(self, frames: list[bytes]) -> T:
        """The one message that ``frames`` hold."""
        payloads = self.payloads(frames)
        if len(payloads) != 1:
            raise TransportError(f"a peer sent {len(payloads)} messages where one is expected")
        return self.decode(payloads[0])

    def payloads(self, frames: list[bytes]) -> list[bytes]:
        """The messages in ``frames``, each for ``decode``."""
        if len(frames) < 2 or frames[0] != SCHEMA_VERSION:
            got = frames[0][:16] if frames else b""
            raise TransportError(
                f"a peer speaks schema {got!r} in {len(frames)} frames, this process {SCHEMA_VERSION!r} in 2 or more: "
                "all processes of a run must use the same version of prorl_hpc"
            )
        return frames[1:]

    def decode(self, payload: bytes) -> T:
        try:
            return self._decoder.decode(payload)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, RecursionError) as error:
            raise TransportError(f"a message from a peer does not decode: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, mode 0600, whole or not at all (written aside, then renamed)."""
    fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(msgspec.json.encode(value))
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def read_json(path: Path, type_: type[T]) -> T | None:
    """Read what write_json wrote; None if the file is not there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except FileNotFoundError:
        return None
