"""The sending side of a weight stream: any number of receivers, each at its own pace, in a thread of its own."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from prorl_hpc.messages.inference import WeightSource
from prorl_hpc.transport.admission import Refusals
from prorl_hpc.transport.weight_stream import (
    MAGIC,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    PROVE_S,
    STALL_S,
    Listing,
    Request,
    StreamedTensor,
    StreamRefused,
    frame_of,
    proof,
    receive_exactly,
    receive_frame,
    send_all,
)

log = logging.getLogger(__name__)

_MAX_STRANGERS = 64
"""Connections that have not proved to have the key yet: when one more comes, the oldest of them has to go."""
_ACCEPT_AGAIN_S = 0.2
_JOIN_S = 5.0


@dataclass(frozen=True)
class OfferedTensor:
    """``data``: its bytes, which nobody changes while it is offered."""

    about: StreamedTensor
    data: memoryview


class WeightServer:
    """Listens on ``host`` from its making to ``close``, on a port that the system picks. What receivers have begun to read
    goes on when it is withdrawn."""

    def __init__(self, host: str, key: bytes) -> None:
        self._key = key
        self._offers: dict[str, Sequence[OfferedTensor]] = {}
        self._strangers: dict[socket.socket, None] = {}
        """Of ``_connections`` those that have not proved their key, oldest first."""
        self._refusals = Refusals()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.create_server((host, 0), backlog=128)
        self._address = self._listener.getsockname()
        self._accepting = threading.Thread(target=self._accept, name="weight-stream", daemon=True)
        self._accepting.start()

    def offer(self, tensors: Sequence[OfferedTensor]) -> WeightSource:
        """Until ``withdraw``, for anybody who has the key."""
        word = secrets.token_urlsafe(16)
        with self._lock:
            self._offers[word] = tensors
        return WeightSource(self._address[0], self._address[1], word)

    def withdraw(self, source: WeightSource) -> None:
        with self._lock:
            self._offers.pop(source.word, None)

    def close(self) -> None:
        """Break all streams off. Idempotent."""
        with self._lock:
            self._closed.set()
            self._offers.clear()
            sockets = [self._listener, *self._connections]
        for one in sockets:
            _shut(one)
        self._accepting.join(_JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
                self._admit(connection, peer[0])
            except (OSError, RuntimeError) as error:  # no file descriptor is left, or no thread: that may pass
                if not self._closed.is_set():
                    self._refuse("no room", f"no server can ask for weights until there is: {error}")
                    self._closed.wait(_ACCEPT_AGAIN_S)

    def _admit(self, connection: socket.socket, peer: str) -> None:
        """Whoever comes is heard: it is those who have been silent for longest that make room."""
        with self._lock:
            full = len(self._strangers) >= _MAX_STRANGERS
        if full:
            self._drop_oldest_stranger()
        with self._lock:
            if self._closed.is_set():
                connection.close()
                return
            self._connections.add(connection)
            self._strangers[connection] = None
        try:
            threading.Thread(target=self._serve, args=(connection, peer), name="weight-sender", daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            connection.close()
            raise

    def _drop_oldest_stranger(self) -> None:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                _shut(oldest)  # its thread closes it, after it has left ``_connections``

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)

    def _refuse(self, kind: str, detail: str) -> None:
        with self._lock:
            self._refusals.add(kind, detail)

    def _serve(self, connection: socket.socket, peer: str) -> None:
        known = False
        with connection:
            try:
                request, nonces = self._greet(connection)
                known = True
                self._send(connection, request, nonces)
            except StreamRefused as error:
                self._refuse("no key", f"{peer} gets no weights: {error}")
            except OSError as error:
                if self._closed.is_set():
                    return
                if known:
                    log.warning("the weight stream to %s broke off: %s", peer, error)
                else:
                    self._refuse("no proof", f"{peer} gets no weights, it has not proved its key: {error}")
            finally:
                self._forget(connection)

    def _greet(self, connection: socket.socket) -> tuple[Request, bytes]:
        """What is asked for, by one who has the key, and the random bytes of both."""
        until = time.monotonic() + PROVE_S
        connection.settimeout(PROVE_S)
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + ours)
        nonces = ours + receive_exactly(connection, NONCE_BYTES, until)
        asked = receive_frame(connection, MAX_REQUEST_BYTES, until)
        theirs = receive_exactly(connection, PROOF_BYTES, until)
        if not hmac.compare_digest(theirs, proof(self._key, b"receiver", nonces, asked)):
            raise StreamRefused("it has not this run's key")
        with self._lock:
            self._strangers.pop(connection, None)
        return msgspec.json.decode(asked[4:], type=Request), nonces

    def _send(self, connection: socket.socket, request: Request, nonces: bytes) -> None:
        with self._lock:
            offered = self._offers.get(request.word)
        if offered is None:
            listing = Listing(
                error="these weights are not offered any more, the trainer has newer ones or was started anew"
            )
            offered = ()
        else:
            listing = Listing([tensor.about for tensor in offered])
        told = frame_of(listing)
        connection.settimeout(STALL_S)
        send_all(connection, memoryview(told + proof(self._key, b"sender", nonces, told)))
        if request.first is not None:
            for tensor in offered[request.first :]:
                send_all(connection, tensor.data)


def _shut(one: socket.socket) -> None:
    """Wake the thread that waits on it."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # it has ended meanwhile
        log.debug("a weight stream had ended already: %s", error)
