"""Tensors over TCP from one process of the run to another that asks for them: what goes over the line, and who asks.

    sender → receiver   MAGIC, 32 random bytes
    receiver → sender   32 random bytes, a frame with a Request, proof of the key
    sender → receiver   a frame with a Listing, proof of the key, then the bytes of the tensors, one after the other

A frame is its length in four bytes, then JSON. A proof is the HMAC-SHA256 of the side's name, all random bytes and the
side's own frame, with the run's key (the challenge and response of ISO/IEC 9798-4, mutual): who has not the key gets
nothing, and feeds nothing to anybody, and what is recorded is of no use another time. The tensors' bytes go in clear.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prorl_hpc.messages.errors import TransportError
from prorl_hpc.messages.inference import WeightSource

MAGIC = b"PRORLWS1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_REQUEST_BYTES = 4096
MAX_LISTING_BYTES = 64 << 20
GREETING_S = 20.0
"""A receiver waits so long for each piece that comes before the tensors."""
PROVE_S = 5.0
"""A sender waits so long for all that a receiver has to say."""
STALL_S = 60.0
"""Without a byte, before the other side is given up."""
CHUNK_BYTES = 4 << 20


class StreamRefused(TransportError):
    """The other side has not the run's key, or does not offer what was asked for: asking again does not help."""


class StreamedTensor(msgspec.Struct, frozen=True):
    """``dtype`` as torch names it, without ``torch.``; ``size`` in bytes."""

    name: str
    dtype: str
    shape: list[int]
    size: int


class Request(msgspec.Struct, frozen=True):
    """The tensors of offer ``word`` from number ``first`` on; None: the listing alone."""

    word: str
    first: int | None = 0


class Listing(msgspec.Struct, frozen=True):
    """All tensors of the offer, or why there are none."""

    tensors: list[StreamedTensor] = []
    error: str = ""


def read_key(path: Path) -> bytes:
    """The key that both sides prove to have, made of a secret file of the run. TransportError."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise TransportError(f"{path} is readable by others: it must have mode 0600 (chmod 600 {path})")
        return hmac.digest(path.read_bytes(), b"prorl_hpc weight stream", hashlib.sha256)
    except OSError as error:
        raise TransportError(f"the key of the weight stream cannot be read: {error}") from error


def proof(key: bytes, side: bytes, nonces: bytes, frame: bytes) -> bytes:
    return hmac.digest(key, side + nonces + frame, hashlib.sha256)


def receive_exactly(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """As ``receive_into``."""
    data = bytearray(size)
    receive_into(connection, memoryview(data), until)
    return bytes(data)


def receive_into(connection: socket.socket, place: memoryview, until: float | None = None) -> None:
    """Fill ``place``. OSError if it does not come. ``until``: on the clock of ``time.monotonic``, in however small pieces it
    comes; else the connection's own timeout holds for each piece."""
    while place:
        if until is not None:
            if (left_s := until - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left_s)
        got = connection.recv_into(place, min(len(place), CHUNK_BYTES))
        if got == 0:
            raise ConnectionResetError("the other side closed the weight stream")
        place = place[got:]


def send_all(connection: socket.socket, data: memoryview) -> None:
    """In pieces, so that a timeout means that nothing moves."""
    for start in range(0, len(data), CHUNK_BYTES):
        connection.sendall(data[start : start + CHUNK_BYTES])


def frame_of(message: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(message)
    return len(body).to_bytes(4, "big") + body


def receive_frame(connection: socket.socket, limit: int, until: float | None = None) -> bytes:
    """With its length, as ``receive_into``. StreamRefused for one that is too long."""
    head = receive_exactly(connection, 4, until)
    size = int.from_bytes(head, "big")
    if size > limit:
        raise StreamRefused(f"the other side of the weight stream announces {size} bytes, allowed are {limit}")
    return head + receive_exactly(connection, size, until)


@dataclass(frozen=True)
class IncomingTensors:
    """``tensors``: all that the offer has. Those from the request's ``first`` on are read into place in this order."""

    tensors: list[StreamedTensor]
    connection: socket.socket

    def read(self, place: memoryview) -> None:
        """The next tensor's bytes, ``size`` of them. OSError."""
        receive_into(self.connection, place)


@contextmanager
def open_stream(source: WeightSource, key: bytes, first: int | None = 0) -> Iterator[IncomingTensors]:
    """Ask ``source`` for its tensors from number ``first`` on; None: for the listing alone. OSError if it is not there or
    breaks off, StreamRefused if it is not of this run or offers other weights by now."""
    with socket.create_connection((source.host, source.port), timeout=GREETING_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listing = _greet(connection, source, key, first)
        connection.settimeout(STALL_S)
        yield IncomingTensors(listing.tensors, connection)


def _greet(connection: socket.socket, source: WeightSource, key: bytes, first: int | None) -> Listing:
    where = f"{source.host}:{source.port}"
    theirs = receive_exactly(connection, len(MAGIC) + NONCE_BYTES)
    if not theirs.startswith(MAGIC):
        raise StreamRefused(f"what listens at {where} is no weight stream of this version")
    ours = secrets.token_bytes(NONCE_BYTES)
    nonces = theirs[len(MAGIC) :] + ours
    asked = frame_of(Request(source.word, first))
    connection.sendall(ours + asked + proof(key, b"receiver", nonces, asked))
    try:
        told = receive_frame(connection, MAX_LISTING_BYTES)
        proved = hmac.compare_digest(receive_exactly(connection, PROOF_BYTES), proof(key, b"sender", nonces, told))
    except ConnectionError as error:
        raise ConnectionRefusedError(f"{where} closed the weight stream at once: {error}") from error
    if not proved:
        raise StreamRefused(f"what listens at {where} has not this run's key")
    listing = msgspec.json.decode(told[4:], type=Listing)
    if listing.error:
        raise StreamRefused(f"{where}: {listing.error}")
    return listing


def listing_of(source: WeightSource, key: bytes) -> list[StreamedTensor]:
    """What ``source`` offers. Raises as ``open_stream``."""
    with open_stream(source, key, None) as incoming:
        return incoming.tensors
