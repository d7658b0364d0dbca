"""Who gets in at a door, and the count of those who do not.

A key is checked by ZAP (ZeroMQ RFC 27). What fails before that, or without a key, is known to the socket's monitor
alone; it names connections by file descriptor, but not in the word that a handshake succeeded, so that word is taken
to be about the oldest connection that is shaking hands. The total is right, whichever it was.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from prorl_hpc.transport.loop_socket import LoopSocket

log = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_ZAP = "inproc://zeromq.zap.01"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED | zmq.EVENT_DISCONNECTED
_numbers = itertools.count()


class Refusals:
    """Counts by kind, and tells the log of each kind once in a while."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._told: dict[str, tuple[float, int]] = {}

    def add(self, kind: str, detail: str) -> None:
        self.counts[kind] += 1
        when, count = self._told.get(kind, (-_LOG_EVERY_S, 0))
        now = time.monotonic()
        if now - when >= _LOG_EVERY_S:
            new = self.counts[kind] - count
            self._told[kind] = (now, self.counts[kind])
            log.warning("refused (%s): %s%s", kind, detail, f"; {new} since the last such line" if new > 1 else "")


class Admission:
    """Lets in the run's client key and no other. Make it before ``door`` is bound, which it watches."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], door: zmq.Socket[bytes], client_public: bytes) -> None:
        self.refusals = Refusals()
        self._allowed = z85.decode(client_public)
        self._handshaking: dict[int, None] = {}
        zap = context.socket(zmq.ROUTER)
        zap.bind(_ZAP)
        self._zap = LoopSocket(zap)
        address = f"inproc://monitor-{next(_numbers)}"
        door.monitor(address, _EVENTS)
        monitor = context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # a full one would block ZeroMQ's own thread
        monitor.connect(address)
        self._monitor = LoopSocket(monitor)
        self._tasks = [asyncio.create_task(self._check_keys()), asyncio.create_task(self._watch())]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._zap.close(linger=0)
        self._monitor.close(linger=0)

    async def _check_keys(self) -> None:
        while True:
            for request in await self._zap.receive():
                route, delimiter, version, request_id, _domain, address, _identity, mechanism, *credentials = request
                known = mechanism == b"CURVE" and credentials == [self._allowed]
                if not known:
                    self.refusals.add("key", f"a client at {address.decode(errors='replace')} has not the run's key")
                status = [b"200", b"", b"agent", b""] if known else [b"400", b"not the run's key", b"", b""]
                self._zap.send([route, delimiter, version, request_id, *status])

    async def _watch(self) -> None:
        while True:
            for message in await self._monitor.receive():
                parsed = parse_monitor_message(message)
                self._take(int(parsed["event"]), int(parsed["value"]))

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._handshaking[value] = None
        elif event == zmq.EVENT_DISCONNECTED:
            if value in self._handshaking:
                del self._handshaking[value]
                self.refusals.add("handshake", "a connection ended before its handshake: not one of the run's agents")
        elif self._handshaking:
            # Succeeded, or failed in a way that ZeroMQ knows.
            self._handshaking.pop(next(iter(self._handshaking)))
            if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self.refusals.add("handshake", "a client speaks no CURVE, or has not this door's key")
