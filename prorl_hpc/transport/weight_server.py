"""The sending side of a weight stream: any number of receivers, each at its own pace, in a thread of its own."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from prorl_hpc.messages.inference import WeightSource
from prorl_hpc.transport.weight_stream import (
    GREETING_S,
    MAGIC,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
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
"""Connections that have not proved to have the key yet: more are closed at once."""
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
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
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
            self._closed = True
            self._offers.clear()
            sockets = [self._listener, *self._connections]
        for one in sockets:
            _shut(one)
        self._accepting.join(_JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.exception("no further server gets weights from here: %s", error)
                return
            if not self._strangers.acquire(blocking=False):
                log.warning("%s is turned away: %d connections have not proved their key yet", peer[0], _MAX_STRANGERS)
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, peer[0]), name="weight-sender", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        with connection:
            with self._lock:
                if self._closed:
                    self._strangers.release()
                    return
                self._connections.add(connection)
            try:
                self._send(connection, *self._greet(connection))
            except StreamRefused as error:
                log.warning("%s gets no weights: %s", peer, error)
            except OSError as error:
                if not self._closed:
                    log.warning("the weight stream to %s broke off: %s", peer, error)
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _greet(self, connection: socket.socket) -> tuple[Request, bytes]:
        """What is asked for, by one who has the key, and the random bytes of both."""
        try:
            connection.settimeout(GREETING_S)
            ours = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(MAGIC + ours)
            nonces = ours + receive_exactly(connection, NONCE_BYTES)
            asked = receive_frame(connection, MAX_REQUEST_BYTES)
            theirs = receive_exactly(connection, PROOF_BYTES)
        finally:
            self._strangers.release()
        if not hmac.compare_digest(theirs, proof(self._key, b"receiver", nonces, asked)):
            raise StreamRefused("it has not this run's key")
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
