"""Both ends of the weight stream, over loopback."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.messages.errors import TransportError
from prorl_hpc.messages.inference import WeightSource
from prorl_hpc.transport import weight_server, weight_stream
from prorl_hpc.transport.weight_server import OfferedTensor, WeightServer
from prorl_hpc.transport.weight_stream import (
    MAGIC,
    Listing,
    Request,
    StreamedTensor,
    StreamRefused,
    frame_of,
    listing_of,
    open_stream,
    proof,
    read_key,
    receive_exactly,
)

KEY = b"the run's key"


def offered(name: str, data: bytes) -> OfferedTensor:
    return OfferedTensor(StreamedTensor(name, "uint8", [len(data)], len(data)), memoryview(data))


TENSORS = [offered("a", b"first"), offered("b", b""), offered("c", os.urandom(9 << 20))]


@pytest.fixture
def server() -> Iterator[WeightServer]:
    made = WeightServer("127.0.0.1", KEY)
    yield made
    made.close()


def read_all(source: WeightSource, first: int = 0, key: bytes = KEY) -> list[bytes]:
    with open_stream(source, key, first) as incoming:
        found = []
        for about in incoming.tensors[first:]:
            found.append(bytearray(about.size))
            incoming.read(memoryview(found[-1]))
        return [bytes(data) for data in found]


def test_what_is_offered_comes_whole_and_in_order_to_many_at_once(server: WeightServer) -> None:
    source = server.offer(TENSORS)
    assert source.host == "127.0.0.1"
    assert [t.name for t in listing_of(source, KEY)] == ["a", "b", "c"]
    found: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(read_all(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[bytes(t.data) for t in TENSORS]] * 4


def test_a_stream_can_be_taken_up_in_the_middle(server: WeightServer) -> None:
    source = server.offer(TENSORS)
    assert read_all(source, 2) == [bytes(TENSORS[2].data)]
    assert read_all(source, 3) == []


def test_two_offers_stand_beside_each_other_until_one_is_withdrawn(server: WeightServer) -> None:
    old, new = server.offer([offered("w", b"old")]), server.offer([offered("w", b"new")])
    assert (read_all(old), read_all(new)) == ([b"old"], [b"new"])
    server.withdraw(old)
    with pytest.raises(StreamRefused, match="not offered any more"):
        listing_of(old, KEY)
    assert read_all(new) == [b"new"]


def test_a_receiver_that_has_begun_gets_the_rest_of_a_withdrawn_offer(server: WeightServer) -> None:
    source = server.offer(TENSORS)
    with open_stream(source, KEY) as incoming:
        server.withdraw(source)
        for tensor in TENSORS:
            place = bytearray(tensor.about.size)
            incoming.read(memoryview(place))
            assert place == tensor.data


def test_a_stranger_gets_nothing_and_the_others_do(server: WeightServer, caplog: pytest.LogCaptureFixture) -> None:
    source = server.offer(TENSORS)
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="closed the weight stream"):
        read_all(source, key=b"a guess")
    assert read_all(source, 2) == [bytes(TENSORS[2].data)]
    assert "127.0.0.1 gets no weights: it has not this run's key" in caplog.text
    assert "a guess" not in caplog.text


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""])
def test_junk_is_closed_and_does_no_harm(server: WeightServer, junk: bytes) -> None:
    source = server.offer(TENSORS[:1])
    with socket.create_connection((source.host, source.port)) as connection:
        assert connection.recv(len(MAGIC)) == MAGIC
        connection.settimeout(10)
        left = b""
        with contextlib.suppress(OSError):  # closed before all of the junk was read
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            while got := connection.recv(4096):
                left += got
        assert b"first" not in left
    assert read_all(source) == [b"first"]


def test_a_recorded_request_is_of_no_use_again(server: WeightServer) -> None:
    source = server.offer(TENSORS)
    ours, asked = secrets.token_bytes(32), frame_of(Request(source.word))
    answers = []
    proved = b""
    for _ in range(2):
        with socket.create_connection((source.host, source.port)) as connection:
            nonces = connection.recv(len(MAGIC) + 32)[len(MAGIC) :] + ours
            proved = proved or proof(KEY, b"receiver", nonces, asked)
            connection.sendall(ours + asked + proved)
            answers.append(connection.recv(1))
    assert answers[0] and not answers[1]


class Impostor:
    """Listens in the trainer's place, without its key."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.source = WeightSource(*self._listener.getsockname(), "word")
        self._thread = threading.Thread(target=self._serve, args=(answer,), daemon=True)
        self._thread.start()

    def _serve(self, answer: bytes) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.sendall(answer)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass

    def close(self) -> None:
        self._listener.close()
        self._thread.join(10)


HELLO = MAGIC + bytes(32)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(64), "no weight stream of this version"),
        (HELLO + frame_of(Listing([TENSORS[0].about])) + bytes(32) + b"first", "has not this run's key"),
        (HELLO + b"\xff\xff\xff\xff", "announces 4294967295 bytes"),
    ],
)
def test_nothing_is_taken_from_one_without_the_key(answer: bytes, why: str) -> None:
    impostor = Impostor(answer)
    with pytest.raises(StreamRefused, match=why):
        read_all(impostor.source)
    impostor.close()


def test_one_who_reads_nothing_is_given_up_and_holds_up_nobody(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_server, "STALL_S", 0.2)
    source = server.offer([offered("w", bytes(64 << 20))])
    with caplog.at_level(logging.WARNING), open_stream(source, KEY):
        assert read_all(source) == [bytes(64 << 20)]
        deadline = time.monotonic() + 20
        while "broke off: timed out" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "the weight stream to 127.0.0.1 broke off: timed out" in caplog.text


def test_a_sender_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "GREETING_S", 0.2)
    impostor = Impostor(b"")
    with pytest.raises(TimeoutError):
        listing_of(impostor.source, KEY)
    impostor.close()


def test_strangers_keep_nobody_out_and_the_oldest_make_room(server: WeightServer) -> None:
    source = server.offer(TENSORS[:1])
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((source.host, source.port)))
            for _ in range(weight_server._MAX_STRANGERS)
        ]
        for one in idle:
            one.settimeout(20)
            assert receive_exactly(one, len(HELLO)).startswith(MAGIC)
        assert read_all(source) == [b"first"]
        assert idle[0].recv(1) == b"", "it has waited for longest"
        idle[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            idle[-1].recv(1)


def test_one_who_drips_is_closed_when_the_time_for_all_is_over(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_server, "PROVE_S", 0.3)
    source = server.offer(TENSORS[:1])
    with socket.create_connection((source.host, source.port), timeout=20) as slow:
        receive_exactly(slow, len(HELLO))
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 96:
                slow.sendall(b"x")
                sent += 1
                time.sleep(0.05)
        assert sent < 96, "it could have gone on"


def test_who_has_proved_its_key_is_no_stranger_however_many_come(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_server, "_MAX_STRANGERS", 2)
    source = server.offer([offered("w", bytes(64 << 20))])
    with open_stream(source, KEY) as incoming, contextlib.ExitStack() as stack:
        for _ in range(5):
            one = stack.enter_context(socket.create_connection((source.host, source.port), timeout=20))
            receive_exactly(one, len(HELLO))
        incoming.read(memoryview(bytearray(64 << 20)))


def test_many_strangers_are_one_line(server: WeightServer, caplog: pytest.LogCaptureFixture) -> None:
    source = server.offer(TENSORS[:1])
    for _ in range(100):
        with socket.create_connection((source.host, source.port)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert read_all(source) == [b"first"]
    deadline = time.monotonic() + 20
    while "gets no weights" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_process_without_file_descriptors_goes_on_when_it_has_some(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = server.offer(TENSORS[:1])
    real, failures = server._listener, [OSError(errno.EMFILE, "Too many open files")] * 3

    class Short:
        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            if failures:
                raise failures.pop()
            return real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(server, "_listener", Short())
    assert read_all(source) == [b"first"]  # the accept that was under way
    assert read_all(source) == [b"first"]
    assert not failures
    assert "Too many open files" in caplog.text


def test_closing_breaks_streams_off_and_ends_the_threads() -> None:
    before = set(threading.enumerate())  # streams of other tests may still be open

    def ours() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("weight-") and t not in before]

    server = WeightServer("127.0.0.1", KEY)
    source = server.offer([offered("w", bytes(64 << 20))])
    with open_stream(source, KEY) as incoming:
        server.close()
        server.close()
        with pytest.raises(OSError):
            incoming.read(memoryview(bytearray(64 << 20)))
    with pytest.raises(OSError):
        listing_of(source, KEY)
    deadline = time.monotonic() + 20
    while ours() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ours() == []


def test_the_key_is_made_of_a_private_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with pytest.raises(TransportError, match="cannot be read"):
        read_key(secret)
    secret.write_bytes(b"s")
    secret.chmod(0o640)
    with pytest.raises(TransportError, match="chmod 600"):
        read_key(secret)
    secret.chmod(0o600)
    assert read_key(secret) != b"s" and len(read_key(secret)) == 32
