"""A run's keys and a door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.messages.control import AgentToCoordinator
from prorl_hpc.transport.channels import RouterDoor
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
