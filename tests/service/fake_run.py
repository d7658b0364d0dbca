"""The HTTP face over a FakeService that has a worker and an LLM server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_service import FakeService

from prorl_hpc.service.client import RolloutClient
from prorl_hpc.service.server import HttpFace


@dataclass
class FakeRun:
    service: FakeService
    face: HttpFace
    socket_path: Path
    token: str

    def client(self, **settings: Any) -> RolloutClient:
        return RolloutClient(str(self.socket_path), **settings)


@asynccontextmanager
async def fake_run(directory: Path, service: FakeService | None = None, **settings: Any) -> AsyncIterator[FakeRun]:
    """``settings`` are those of HttpFace."""
    if service is None:
        service = FakeService()
        service.add_worker()
        service.add_own_server()
    socket_path = directory / "f.http"
    async with HttpFace(service, socket_path, tcp_host="127.0.0.1", token="a-token", **settings) as face:
        yield FakeRun(service, face, socket_path, "a-token")
        await service.close()
