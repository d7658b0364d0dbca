"""A sandbox for one measurement, and programs of the bench that run inside it, beside what is measured.

async with SandboxBed.open() as bed:
    await bed.sandbox.call("bash", …)
    await bed.inside("bare_pty.py", …)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import shlex
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.sandbox.apptainer import INSIDE, server_argv
from prorl_hpc.sandbox.factory import make_runtime
from prorl_hpc.sandbox.local import SITE
from prorl_hpc.sandbox.protocol import Runtime, Sandbox, SandboxSpec

PEERS = Path(__file__).parent / "peers"
_PROGRAM_S = 300.0


class SandboxBed:
    """``sandbox`` runs; its workspace is empty but for ``.bench``, where the bench's programs are."""

    def __init__(self, sandbox: Sandbox, python: list[str], site: str) -> None:
        self.sandbox = sandbox
        self._python = python
        self._site = site

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, kind: str = "apptainer", config: SandboxConfig | None = None) -> AsyncIterator[SandboxBed]:
        async with open_runtime(kind, config or SandboxConfig()) as runtime:
            sandbox = await runtime.start(SandboxSpec("bench"))
            yield cls(sandbox, *_python_inside(kind))

    async def bring(self, name: str, content: bytes) -> str:
        """A file of the bench's, out of the way of ``ls``; its path."""
        await self.sandbox.upload(f".bench/{name}", content)
        return f".bench/{name}"

    async def bring_environment(self, environment: Path) -> str:
        """The packages of a virtual environment, made with the Python that runs inside; their directory."""
        (packages,) = environment.glob("lib/python3*/site-packages")
        packed = await asyncio.to_thread(_packed, packages)
        archive = await self.bring(f"{environment.name}.tar", packed)
        site = f".bench/{environment.name}"
        await self._run([*self._python, "-m", "tarfile", "-e", archive, site])
        return site

    async def inside(self, program: str, calls: int, command: str, *flags: str, site: str = "") -> list[float]:
        """Run a program of ``peers`` in the sandbox; the seconds that it prints. RunError with its last words."""
        script = await self.bring(program, (PEERS / program).read_bytes())
        argv = [*self._python, "-I", "-S", script, site or self._site, str(calls), command, *flags]
        return msgspec.json.decode(await self._run(argv), type=list[float])

    async def _run(self, argv: list[str]) -> str:
        """The last line that it prints."""
        done = await self.sandbox.call("bash", {"command": shlex.join(argv)}, _PROGRAM_S)
        lines = done.output.strip().splitlines() or [""]
        if done.exit_code != 0:
            raise RunError(f"{lines[-1]} ({' '.join(argv)} in the sandbox, exit code {done.exit_code})")
        return lines[-1]


def _packed(packages: Path) -> bytes:
    """A tar archive of all but pip and its like."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in packages.iterdir():
            if not path.name.startswith(("pip", "setuptools", "pkg_resources", "_distutils")):
                tar.add(path, path.name)
    return archive.getvalue()


def _python_inside(kind: str) -> tuple[list[str], str]:
    """The Python of the tool server, and the directory with its packages."""
    if kind == "local":
        return [sys.executable], SITE
    server = server_argv("")
    return server[: server.index("-I")], f"{INSIDE}/kit/site"


@contextlib.asynccontextmanager
async def open_runtime(kind: str, config: SandboxConfig) -> AsyncIterator[Runtime]:
    """A worker's runtime; closed at the end, with all its sandboxes. SandboxError where it does not work."""
    with scratch_directory() as directory:
        runtime = await make_runtime(dataclasses.replace(config, kind=kind), directory, "bench")
        try:
            yield runtime
        finally:
            await runtime.close()
