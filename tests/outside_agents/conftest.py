"""The LLM gateway, and sandboxes without network to run agents in."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hermes_chat import write_hermes_model
from outside_bed import Bed

from prorl_hpc.agents.chat_format import ChatFormat
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.gateway.server import Gateway
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.apptainer import ApptainerRuntime
from prorl_hpc.sandbox.local import LocalRuntime
from prorl_hpc.sandbox.protocol import Runtime

KINDS = [pytest.param("local"), pytest.param("apptainer", marks=pytest.mark.apptainer)]


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.open(write_hermes_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own directories are too deep for socket paths. What a test leaves there but the socket's place fails it."""
    place = Path(tempfile.mkdtemp(prefix="poa-", dir="/tmp"))
    path = place / f"prorl-{os.getuid()}-t"
    path.mkdir(mode=0o700)
    yield path
    left = [str(p) for p in path.rglob("*")]
    shutil.rmtree(place)
    assert left == []


@pytest.fixture(params=KINDS)
async def bed(request: pytest.FixtureRequest, short: Path, chat: ChatFormat) -> AsyncIterator[Bed]:
    runtime = await prepared(request.param, short)
    gateway = Gateway(short / "llm.sock")
    await gateway.start()
    try:
        yield Bed(runtime, gateway, chat)
    finally:
        await runtime.close()
        await gateway.close()


async def prepared(kind: str, place: Path) -> Runtime:
    config = SandboxConfig(start_retries=0)
    runtime = LocalRuntime(config, place) if kind == "local" else ApptainerRuntime(config, place)
    try:
        await runtime.prepare()
    except SandboxError as error:
        if kind == "apptainer":
            pytest.skip(f"apptainer does not work on this machine: {error}")
        raise
    return runtime
