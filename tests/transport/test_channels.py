"""CURVE doors: the run's clients get in, nobody else does; nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from prorl_hpc.messages.codec import SCHEMA_VERSION, Decoder, encode
from prorl_hpc.messages.control import AgentToCoordinator, CoordinatorToWorker, Welcome, WorkerLoad
from prorl_hpc.messages.errors import TransportError
from prorl_hpc.transport.addresses import node_address
from prorl_hpc.transport.channels import DealerLine, RouterDoor, choose_endpoint
from prorl_hpc.transport.keys import RunKeys


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys.create(tmp_path / "keys")


@pytest.fixture
async def door(keys: RunKeys, tmp_path: Path) -> Iterator[RouterDoor[AgentToCoordinator]]:
    opened: RouterDoor[AgentToCoordinator] = RouterDoor(AgentToCoordinator, keys, tmp_path / "c.zmq", "127.0.0.1")
    yield opened
    opened.close()
    assert not (tmp_path / "c.zmq").exists()


async def first(messages):  # type: ignore[no-untyped-def]
    return await asyncio.wait_for(anext(aiter(messages)), 5)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_messages_go_both_ways(door: RouterDoor[AgentToCoordinator], keys: RunKeys, kind: str) -> None:
    line: DealerLine[CoordinatorToWorker] = DealerLine(CoordinatorToWorker, keys, getattr(door, kind), "w0")
    await line.send(WorkerLoad("w0", 3))
    assert await first(door.messages()) == (b"w0", WorkerLoad("w0", 3))
    await door.send(b"w0", Welcome("run", 1.0))
    assert await first(line.messages()) == Welcome("run", 1.0)
    line.close()


async def test_the_unix_socket_is_private(door: RouterDoor[AgentToCoordinator], tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "c.zmq").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_client_of_another_run_is_not_let_in(
    door: RouterDoor[AgentToCoordinator], keys: RunKeys, tmp_path: Path, kind: str
) -> None:
    other = RunKeys.create(tmp_path / "other")
    stranger = dataclasses.replace(other, server_public=keys.server_public)
    line: DealerLine[CoordinatorToWorker] = DealerLine(CoordinatorToWorker, stranger, getattr(door, kind), "evil")
    await line.send(WorkerLoad("evil", 1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(aiter(door.messages())), 0.5)
    line._socket.close(linger=0)


async def test_a_client_without_encryption_is_not_let_in(door: RouterDoor[AgentToCoordinator]) -> None:
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(door.tcp)
    plain.send_multipart(encode(WorkerLoad("evil", 1)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(aiter(door.messages())), 0.5)
    plain.close(linger=0)
    context.term()


async def test_garbage_is_dropped_and_the_door_stays_open(door: RouterDoor[AgentToCoordinator], keys: RunKeys) -> None:
    line: DealerLine[CoordinatorToWorker] = DealerLine(CoordinatorToWorker, keys, door.ipc, "w0")
    await line._socket.send_multipart([b"other-schema", b"x"])
    await line._socket.send_multipart([SCHEMA_VERSION, b"\xff\xff"])
    await line.send(WorkerLoad("w0", 1))
    assert (await first(door.messages()))[1] == WorkerLoad("w0", 1)
    line.close()


def test_a_peer_of_another_version_is_named() -> None:
    with pytest.raises(TransportError, match="same version of prorl_hpc"):
        Decoder(AgentToCoordinator)([b"prorl0", b""])


def test_keys_are_private_and_refused_when_they_are_not(keys: RunKeys, tmp_path: Path) -> None:
    for path in (tmp_path / "keys").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys == RunKeys.load(tmp_path / "keys")
    assert keys.api_token not in repr(keys)
    (tmp_path / "keys" / "server.secret").chmod(0o644)
    with pytest.raises(TransportError, match="chmod 600"):
        RunKeys.load(tmp_path / "keys")
    with pytest.raises(FileExistsError):
        RunKeys.create(tmp_path / "keys")


def test_the_same_node_takes_the_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "x.zmq"
    path.touch()
    assert choose_endpoint("a", "a", f"ipc://{path}", "tcp://h:1") == f"ipc://{path}"
    assert choose_endpoint("a", "b", f"ipc://{path}", "tcp://h:1") == "tcp://h:1"
    with pytest.raises(TransportError, match="no TCP endpoint"):
        choose_endpoint("a", "b", f"ipc://{path}", "")


def test_an_unknown_interface_is_answered_with_the_known_ones() -> None:
    with pytest.raises(TransportError, match="interfaces that have one"):
        node_address("nosuch0")
    assert node_address().count(".") == 3
