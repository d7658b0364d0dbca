"""What knocks at a door and is not of this run, or does not read: refused, counted, told once, never in the way."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from prorl_hpc.messages.codec import SCHEMA_VERSION, encode, encode_many
from prorl_hpc.messages.control import AgentToCoordinator, CoordinatorToWorker, Discard, WorkerLoad
from prorl_hpc.transport.channels import DealerLine, RouterDoor
from prorl_hpc.transport.keys import RunKeys

Door = RouterDoor[AgentToCoordinator]
PATIENCE_S = 10

CURVE_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + b"\0" * 15 + b"\0" + b"\0" * 31
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random": bytes(range(1, 255)) * 20,
    "ff": b"\xff" * 5000,
    "no handshake": CURVE_GREETING + b"\x5a" * 300,
    "giant frame": CURVE_GREETING + b"\x06" + b"\xff" * 8,
}


def line_to(door: Door, keys: RunKeys, kind: str = "tcp", identity: str = "w0") -> DealerLine[CoordinatorToWorker]:
    return DealerLine(CoordinatorToWorker, keys, getattr(door, kind), identity)


def raw_client(door: Door, keys: RunKeys | None, identity: bytes = b"w0") -> zmq.Socket[bytes]:
    """What is not our DealerLine; with the run's keys or without any."""
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    client.linger = 0
    client.identity = identity
    client.reconnect_ivl = 100_000
    if keys is not None:
        client.curve_serverkey, client.curve_publickey = keys.server_public, keys.client_public
        client.curve_secretkey = keys.client_secret
    client.connect(door.tcp)
    return client


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def still_serves(door: Door, keys: RunKeys) -> None:
    line = line_to(door, keys, identity="good")
    await line.send(WorkerLoad("good", 1))
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(door.messages()) == (b"good", WorkerLoad("good", 1))
    line.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_client_of_another_run(door: Door, keys: RunKeys, tmp_path: Path, kind: str) -> None:
    other = RunKeys.create(tmp_path / "other")
    stranger = line_to(door, dataclasses.replace(other, server_public=keys.server_public), kind)
    await stranger.send(WorkerLoad("evil", 1))
    await until(lambda: door.refused["key"])
    assert not door.refused["handshake"]
    stranger._socket.close(linger=0)
    await still_serves(door, keys)


async def test_a_client_that_knows_not_the_doors_key(door: Door, keys: RunKeys, tmp_path: Path) -> None:
    other = RunKeys.create(tmp_path / "other")
    stranger = line_to(door, dataclasses.replace(keys, server_public=other.server_public))
    await stranger.send(WorkerLoad("evil", 1))
    await until(lambda: door.refused["handshake"])
    stranger._socket.close(linger=0)
    await still_serves(door, keys)


async def test_a_client_without_encryption(door: Door, keys: RunKeys) -> None:
    plain = raw_client(door, None)
    plain.send_multipart(encode(WorkerLoad("evil", 1)))
    await until(lambda: door.refused["handshake"])
    plain.close()
    await still_serves(door, keys)


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_on_the_port(door: Door, keys: RunKeys, garbage: str) -> None:
    port = int(door.tcp.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(GARBAGE[garbage])
        await until(lambda: door.refused["handshake"] == 1)
    await still_serves(door, keys)
    assert door.refused == {"handshake": 1}


async def test_a_flood_of_garbage_is_told_once(door: Door, keys: RunKeys, caplog: pytest.LogCaptureFixture) -> None:
    port = int(door.tcp.rpartition(":")[2])
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(os.urandom(100))
    await until(lambda: door.refused["handshake"] == 50)
    assert caplog.text.count("refused (handshake)") == 1
    await still_serves(door, keys)


@pytest.mark.parametrize(
    "frames",
    [
        [b"other-schema", b"x"],
        [SCHEMA_VERSION],
        [b""],
        [SCHEMA_VERSION, b"\xff\xff"],
        [SCHEMA_VERSION, b"\x81\xa4type\xacNoSuchThing1"],
        encode(Discard("r1")),
    ],
)
async def test_what_does_not_decode(door: Door, keys: RunKeys, frames: list[bytes]) -> None:
    client = raw_client(door, keys)
    client.send_multipart(frames)
    client.send_multipart(encode(WorkerLoad("w0", 2)))
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(door.messages()) == (b"w0", WorkerLoad("w0", 2))
    assert door.refused == {"undecodable": 1}
    client.close()


async def test_one_bad_message_among_many_is_left_out(door: Door, keys: RunKeys) -> None:
    client = raw_client(door, keys)
    version, first, second = encode_many([WorkerLoad("w0", 1), WorkerLoad("w0", 2)])
    client.send_multipart([version, first, b"\xc1", second])
    heard = door.messages()
    async with asyncio.timeout(PATIENCE_S):
        assert [(await anext(heard))[1].sandboxes for _ in range(2)] == [1, 2]
    assert door.refused == {"undecodable": 1}
    client.close()


async def test_a_giant_frame_ends_its_senders_connection(keys: RunKeys, tmp_path: Path) -> None:
    door: Door = RouterDoor(AgentToCoordinator, keys, tmp_path / "c", "127.0.0.1", max_message_bytes=10_000)
    giant = raw_client(door, keys)
    giant.send_multipart([SCHEMA_VERSION, b"x" * 20_000])
    monitor = giant.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    await until(lambda: monitor.poll(0))
    await still_serves(door, keys)
    giant.close()
    monitor.close(linger=0)
    door.close()


async def test_a_peer_that_never_reads_is_in_nobodys_way(keys: RunKeys, tmp_path: Path) -> None:
    """Its queue fills up and no further; the others get all of theirs."""
    door: Door = RouterDoor(AgentToCoordinator, keys, tmp_path / "c", "127.0.0.1", queue=100)
    deaf = raw_client(door, keys, b"deaf")
    deaf.rcvhwm = 1
    deaf.send_multipart(encode(WorkerLoad("deaf", 0)))
    good = line_to(door, keys, identity="good")
    await good.send(WorkerLoad("good", 0))
    knocks = door.messages()
    async with asyncio.timeout(PATIENCE_S):
        assert {(await anext(knocks))[0] for _ in range(2)} == {b"deaf", b"good"}
    answers = good.messages()
    filling = Discard("x" * 100_000)
    async with asyncio.timeout(60):
        for i in range(1000):
            await door.send(b"deaf", filling)
            await door.send(b"good", Discard(f"r{i}"))
            assert await anext(answers) == Discard(f"r{i}")
    assert door.dropped["full"] > 0
    deaf.close()
    good.close()
    door.close()


async def test_a_message_to_nobody_is_dropped(door: Door) -> None:
    await door.send(b"nobody", Discard("r1"))
    assert door.dropped == {"gone": 1}
