"""The floor of a sandbox's start: one ``apptainer exec`` by hand, with our isolation, of an echo server."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from pathlib import Path

from prorl_hpc.bench.sandbox_bed import PEERS
from prorl_hpc.messages.errors import RunError
from prorl_hpc.sandbox.apptainer import isolation_flags, launcher_environment
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.directories import Box
from prorl_hpc.sandbox.host_image import make_host_image

_ANSWER_S = 30.0
_END_S = 10.0


class ByHand:
    """The ``host`` image in ``directory``, and containers of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workspace = directory / "work"
        self._workspace.mkdir(parents=True)
        shutil.copy(PEERS / "echo_server.py", self._workspace)
        self._image = directory / "image"
        self._binds = [f"{self._workspace}:/workspace", *(f"{p}:{p}:ro" for p in make_host_image(self._image))]

    async def start(self) -> float:
        """Seconds from its start to its first answer; ended again afterwards. RunError with its words."""
        binary = find_binary()
        argv = [binary, "-q", "-s", "exec", *isolation_flags("none")]
        for bind in self._binds:
            argv += ["--bind", bind]
        # Without -I and -S Python would look for packages, which the floor has no need of.
        argv += [str(self._image), "python3", "-I", "-S", "/workspace/echo_server.py"]
        pipe = asyncio.subprocess.PIPE
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=launcher_environment(binary, Box(self._directory))
        )
        assert process.stdin and process.stdout and process.stderr
        try:
            process.stdin.write(b"hello\n")
            async with asyncio.timeout(_ANSWER_S):
                answer = await process.stdout.readline()
            seconds = time.perf_counter() - began
            process.stdin.close()
            async with asyncio.timeout(_END_S):
                words = (await process.stderr.read()).decode(errors="replace").strip()
                await process.wait()
        except TimeoutError:
            raise RunError("the container that was started by hand gave no answer, or did not end") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
        if answer != b"hello\n":
            raise RunError(f"the container that was started by hand gave no answer: {words[-500:]}")
        return seconds
