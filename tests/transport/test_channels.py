"""CURVE doors: the run's clients get in, nobody else does; nothing is left behind."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from prorl_hpc.messages.codec import SCHEMA_VERSION, Decoder
from prorl_hpc.messages.control import (
    AgentToCoordinator,
    CoordinatorToWorker,
    Discard,
    Goodbye,
    Welcome,
    WorkerLoad,
)
from prorl_hpc.messages.errors import TransportError
from prorl_hpc.transport.addresses import node_address
from prorl_hpc.transport.channels import DealerLine, RouterDoor, choose_endpoint
from prorl_hpc.transport.keys import RunKeys


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


async def test_many_messages_in_one_stay_in_order(door: RouterDoor[AgentToCoordinator], keys: RunKeys) -> None:
    line: DealerLine[CoordinatorToWorker] = DealerLine(CoordinatorToWorker, keys, door.ipc, "w0")
    up = [WorkerLoad("w0", i) for i in range(1000)]
    await line.send_many(up[:600])
    await line.send(up[600])
    await line.send_many([])
    await line.send_many(up[601:])
    at_door = door.messages()
    assert [await anext(at_door) for _ in up] == [(b"w0", message) for message in up]
    down = [Discard(f"r{i}") for i in range(1000)]
    await door.send_many(b"w0", down[:1])
    await door.send_many(b"w0", down[1:])
    assert [await first(line.messages()) for _ in down] == down
    line.close()


async def test_a_message_that_no_peer_takes_is_not_sent(keys: RunKeys, tmp_path: Path) -> None:
    small: RouterDoor[AgentToCoordinator] = RouterDoor(
        AgentToCoordinator, keys, tmp_path / "small", max_message_bytes=100
    )
    line: DealerLine[CoordinatorToWorker] = DealerLine(
        CoordinatorToWorker, keys, small.ipc, "w0", max_message_bytes=100
    )
    with pytest.raises(TransportError, match="larger than a peer takes: at most 100"):
        await line.send(Goodbye("x" * 100))
    with pytest.raises(TransportError, match="larger than a peer takes: at most 100"):
        await small.send(b"w0", Discard("x" * 100))
    line.close()
    small.close()


def test_a_peer_of_another_version_is_named() -> None:
    with pytest.raises(TransportError, match="same version of prorl_hpc"):
        Decoder(AgentToCoordinator)([b"prorl0", b""])
    with pytest.raises(TransportError, match="2 messages where one is expected"):
        Decoder(AgentToCoordinator)([SCHEMA_VERSION, b"", b""])


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
    with pytest.raises(TransportError, match="it has:"):
        node_address("nosuch0")
    assert node_address().count(".") == 3
