"""ZeroMQ between processes: a ROUTER door per node's agent, a DEALER for each who knocks.

Both ends speak CURVE with the run's keys, on Unix sockets (``ipc://``) as on TCP. Messages are the unions of
prorl_hpc.messages; several to one peer travel in one ZeroMQ message, and messages of one peer stay in order.
Whatever comes in at a door that is not a message of an agent of this run is refused and counted, never fatal; a
peer that does not read holds up nobody else.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

from prorl_hpc.messages.codec import Decoder, encode_many
from prorl_hpc.messages.errors import TransportError
from prorl_hpc.transport.admission import Admission, Refusals
from prorl_hpc.transport.keys import RunKeys
from prorl_hpc.transport.loop_socket import LoopSocket
from prorl_hpc.transport.reconnection import ReconnectionWatch

T = TypeVar("T")

MAX_MESSAGE_BYTES = 256 << 20
_HANDSHAKE_MS = 10_000
_QUEUE = 100_000
"""ZeroMQ messages held for one peer."""


class RouterDoor(Generic[T]):
    """The one ZeroMQ door of a process: binds ``ipc_path`` and, if asked, a TCP port chosen by the system. Use inside
    a running event loop."""

    def __init__(
        self,
        union: Any,
        keys: RunKeys,
        ipc_path: Path,
        tcp_host: str | None = None,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        queue: int = _QUEUE,
    ) -> None:
        """``tcp_host``: the address that other nodes use for this one; None: no TCP at all. A larger message than
        ``max_message_bytes`` ends its peer's connection. At most ``queue`` messages wait for a peer that does not
        read; what comes after them is dropped."""
        self._decoder: Decoder[T] = Decoder(union)
        self._context = zmq.Context()
        self._max_message_bytes = max_message_bytes
        self._heard: deque[tuple[bytes, T]] = deque()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 500
        socket.sndhwm = socket.rcvhwm = queue
        socket.maxmsgsize = max_message_bytes
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.router_handover = True
        socket.router_mandatory = True
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret
        socket.curve_publickey = keys.server_public
        self._admission = Admission(self._context, socket, keys.client_public)
        self._unsent = Refusals()
        self._ipc_path = ipc_path
        ipc_path.unlink(missing_ok=True)
        socket.bind(f"ipc://{ipc_path}")
        ipc_path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        self.ipc = f"ipc://{ipc_path}"
        self.tcp = ""
        if tcp_host is not None:
            port = socket.bind_to_random_port("tcp://*")
            self.tcp = f"tcp://{tcp_host}:{port}"
        self._socket = LoopSocket(socket)

    @property
    def refused(self) -> Counter[str]:
        """What came in and was not let in, since start: ``handshake`` (no CURVE, a wrong key of this door, garbage),
        ``key`` (not the run's client key), ``undecodable`` (no message of this direction)."""
        return self._admission.refusals.counts

    @property
    def dropped(self) -> Counter[str]:
        """What could not be sent, since start: ``gone`` (no such peer now), ``full`` (it does not read)."""
        return self._unsent.counts

    async def send(self, peer: bytes, message: Any) -> None:
        """Queue a message for ``peer``, at once. To a peer that is gone or does not read it is dropped and counted.
        TransportError if it is too large."""
        await self.send_many(peer, (message,))

    async def send_many(self, peer: bytes, messages: Iterable[Any]) -> None:
        """As ``send``, in order, all or none of them."""
        frames = _frames(messages, self._max_message_bytes)
        if len(frames) < 2:
            return
        try:
            self._socket.send([peer, *frames])
        except zmq.Again:
            self._unsent.add("full", f"{len(frames) - 1} messages to {peer!r}, which does not read")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unsent.add("gone", f"{len(frames) - 1} messages to {peer!r}, which is not connected")

    async def messages(self) -> AsyncIterator[tuple[bytes, T]]:
        """Messages as (peer, message), for ever; cancel the task to end it."""
        while True:
            while self._heard:
                yield self._heard.popleft()
            for peer, *frames in await self._socket.receive():
                self._take(peer, frames)

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            for payload in self._decoder.payloads(frames):
                try:
                    self._heard.append((peer, self._decoder.decode(payload)))
                except TransportError as error:
                    self._admission.refusals.add("undecodable", f"from {peer!r}: {error}")
        except TransportError as error:
            self._admission.refusals.add("undecodable", f"from {peer!r}: {error}")

    def close(self) -> None:
        self._socket.close()
        self._admission.close()
        self._context.term()
        self._ipc_path.unlink(missing_ok=True)


class DealerLine(Generic[T]):
    """A client's line to one door. ``identity`` is how the door knows this peer. What is sent while there is no
    connection waits, without limit: who uses the line gives up when it is silent too long."""

    def __init__(
        self,
        union: Any,
        keys: RunKeys,
        endpoint: str,
        identity: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        reconnected: Callable[[], None] | None = None,
    ) -> None:
        """``reconnected`` is called when the line was cut and is up again: messages may have been lost both ways."""
        self.endpoint = endpoint
        self._decoder: Decoder[T] = Decoder(union)
        self._max_message_bytes = max_message_bytes
        self._heard: deque[bytes] = deque()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        socket.linger = 500
        socket.sndhwm, socket.rcvhwm = 0, _QUEUE
        socket.maxmsgsize = max_message_bytes
        socket.identity = identity.encode()
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret
        socket.heartbeat_ivl = 5000
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        self._watch = ReconnectionWatch(context, socket, reconnected) if reconnected is not None else None
        socket.connect(endpoint)
        self._socket = LoopSocket(socket)

    async def send(self, message: Any) -> None:
        """Queue a message, at once. TransportError if it is too large."""
        await self.send_many((message,))

    async def send_many(self, messages: Iterable[Any]) -> None:
        """As ``send``, in order."""
        frames = _frames(messages, self._max_message_bytes)
        if len(frames) > 1:
            self._socket.send(frames)

    async def messages(self) -> AsyncIterator[T]:
        """Messages from the door, for ever; raises TransportError on one that does not decode."""
        while True:
            while self._heard:
                yield self._decoder.decode(self._heard.popleft())
            for frames in await self._socket.receive():
                self._heard.extend(self._decoder.payloads(frames))

    def close(self) -> None:
        self._socket.close()
        if self._watch is not None:
            self._watch.close()


def _frames(messages: Iterable[Any], limit_bytes: int) -> Sequence[bytes]:
    frames = encode_many(messages)
    largest = max(map(len, frames))
    if largest > limit_bytes:
        raise TransportError(f"a message of {largest} bytes is larger than a peer takes: at most {limit_bytes}")
    return frames


def choose_endpoint(node: str, peer_node: str, ipc: str, tcp: str) -> str:
    """The Unix socket on the same node, TCP otherwise."""
    if node == peer_node and os.path.exists(ipc.removeprefix("ipc://")):  # noqa: PTH110
        return ipc
    if not tcp:
        raise TransportError(
            f"{peer_node} offers no TCP endpoint and this node is {node}: is the plan for one node only?"
        )
    return tcp
