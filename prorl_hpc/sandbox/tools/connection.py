"""The server's end of the connection to the worker."""

from __future__ import annotations

from prorl_hpc.sandbox.tools.framing import BadFrame, Decoder, encode
from prorl_hpc.sandbox.tools.loop import READ, WRITE, Ended, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable
    from typing import Any

READ_BYTES = 1 << 18
HIGH_WATER_BYTES = 8 << 20
"""With more than this unsent, no new calls are read: a worker that does not take its answers gets no more of them."""
LAST_WORDS_S = 1.0


class Connection:
    """Frames go out in order and never make the server wait. Raises Ended where the worker is gone or talks nonsense."""

    def __init__(self, loop: Loop, peer: _socket.socket, on_frame: Callable[[dict[str, Any], bytes], None]) -> None:
        self._loop = loop
        self._peer = peer
        self._on_frame = on_frame
        self._decoder = Decoder()
        self._buffer = bytearray(READ_BYTES)  # a new one for each read costs three calls of the kernel
        self._unsent: list[memoryview] = []
        self._unsent_bytes = 0
        self._events = READ
        peer.setblocking(False)
        loop.watch(peer.fileno(), self._ready)

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        frame = encode(header, body)
        self._unsent.append(memoryview(frame))
        self._unsent_bytes += len(frame)
        self._flush()

    def send_last(self, header: dict[str, Any]) -> None:
        """Whatever else is unsent, and this."""
        self._peer.settimeout(LAST_WORDS_S)
        try:
            for frame in self._unsent:
                self._peer.sendall(frame)
            self._peer.sendall(encode(header))
        except OSError:
            pass  # the worker is gone: nobody is left to be told

    def _ready(self) -> None:
        if self._unsent:
            self._flush()
        if not self._events & READ:
            return
        try:
            size = self._peer.recv_into(self._buffer)
        except BlockingIOError:
            return
        except ConnectionError:
            size = 0
        if not size:
            raise Ended("")
        try:
            for header, body in self._decoder.feed(bytes(memoryview(self._buffer)[:size])):
                self._on_frame(header, body)
        except BadFrame as error:
            raise Ended(f"the worker sent what is no frame: {error}") from error

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._peer.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    del self._unsent[0]
        except BlockingIOError:
            pass
        except ConnectionError:
            raise Ended("") from None
        events = WRITE if self._unsent else 0
        if self._unsent_bytes <= HIGH_WATER_BYTES:
            events |= READ
        if events != self._events:
            self._events = events
            self._loop.watch(self._peer.fileno(), self._ready, events)
