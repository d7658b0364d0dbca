"""ZeroMQ between processes: a ROUTER door per node's agent, a DEALER for each who knocks.

Both ends speak CURVE with the run's keys, on Unix sockets (``ipc://``) as on TCP. Messages are the
unions of prorl_hpc.messages; a frame that does not decode is logged and dropped, never fatal to the door.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from prorl_hpc.messages.codec import Decoder, encode
from prorl_hpc.messages.errors import TransportError
from prorl_hpc.transport.keys import RunKeys

log = logging.getLogger(__name__)
T = TypeVar("T")


class _OnlyTheRunsClients:
    """ZAP credentials: lets in the run's client key (Z85) and no other."""

    def __init__(self, client_public: bytes) -> None:
        self._allowed = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._allowed


class RouterDoor(Generic[T]):
    """The one ZeroMQ door of a process: binds ``ipc_path`` and, if asked, a TCP port chosen by the system."""

    def __init__(self, union: Any, keys: RunKeys, ipc_path: Path, tcp_host: str | None = None) -> None:
        """``tcp_host``: the address that other nodes use for this one; None: no TCP at all."""
        self._decode: Decoder[T] = Decoder(union)
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(credentials_provider=_OnlyTheRunsClients(keys.client_public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 500
        self._socket.sndhwm = self._socket.rcvhwm = 100_000
        self._socket.router_handover = True
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server_secret
        self._socket.curve_publickey = keys.server_public
        self._ipc_path = ipc_path
        ipc_path.unlink(missing_ok=True)
        self._socket.bind(f"ipc://{ipc_path}")
        ipc_path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        self.ipc = f"ipc://{ipc_path}"
        self.tcp = ""
        if tcp_host is not None:
            port = self._socket.bind_to_random_port("tcp://*")
            self.tcp = f"tcp://{tcp_host}:{port}"

    async def send(self, peer: bytes, message: Any) -> None:
        """Queue a message for ``peer``; one to a peer that is gone is dropped by ZeroMQ."""
        await self._socket.send_multipart([peer, *encode(message)])

    async def messages(self) -> AsyncIterator[tuple[bytes, T]]:
        """Messages as (peer, message), for ever; cancel the task to end it."""
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                yield peer, self._decode(frames)
            except TransportError as error:
                log.error("dropped a message from %r: %s", peer, error)

    def close(self) -> None:
        self._auth.stop()
        self._socket.close()
        self._context.term()
        self._ipc_path.unlink(missing_ok=True)


class DealerLine(Generic[T]):
    """A client's line to one door. ``identity`` is how the door knows this peer."""

    def __init__(self, union: Any, keys: RunKeys, endpoint: str, identity: str) -> None:
        self.endpoint = endpoint
        self._decode: Decoder[T] = Decoder(union)
        self._context = zmq.asyncio.Context.instance()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 500
        self._socket.sndhwm = self._socket.rcvhwm = 100_000
        self._socket.identity = identity.encode()
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey = keys.client_public
        self._socket.curve_secretkey = keys.client_secret
        self._socket.heartbeat_ivl = 5000
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 100, 2000
        self._socket.connect(endpoint)

    async def send(self, message: Any) -> None:
        await self._socket.send_multipart(encode(message))

    async def messages(self) -> AsyncIterator[T]:
        """Messages from the door, for ever; raises TransportError on one that does not decode."""
        while True:
            yield self._decode(await self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close()


def choose_endpoint(node: str, peer_node: str, ipc: str, tcp: str) -> str:
    """The Unix socket on the same node, TCP otherwise."""
    if node == peer_node and os.path.exists(ipc.removeprefix("ipc://")):  # noqa: PTH110
        return ipc
    if not tcp:
        raise TransportError(
            f"{peer_node} offers no TCP endpoint and this node is {node}: is the plan for one node only?"
        )
    return tcp
