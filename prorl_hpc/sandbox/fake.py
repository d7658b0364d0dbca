"""An in-memory runtime for the tests of other rooms: files in a dict, ``bash`` by a function."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import check_spec
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, SandboxStats, ToolResult

WORKSPACE = "/workspace"
Bash = Callable[[str, dict[str, bytes]], ToolResult | str]
"""(command, files by path within the workspace) → the result, or just its output. The files may be changed."""


def cat(command: str, files: dict[str, bytes]) -> ToolResult:
    """The default ``bash``: knows ``cat FILE``."""
    words = command.split()
    if len(words) == 2 and words[0] == "cat" and words[1] in files:
        return ToolResult(files[words[1]].decode())
    return ToolResult(f"fake bash: cannot run {command!r}\n", exit_code=127)


class FakeSandbox:
    """One fake sandbox; ``calls`` lists what was asked of it."""

    def __init__(self, spec: SandboxSpec, bash: Bash) -> None:
        self.spec = spec
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.stopped = False
        self._bash = bash

    @property
    def sandbox_id(self) -> str:
        return self.spec.sandbox_id

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        self._check_running()
        self.calls.append((tool, arguments))
        if tool != "bash":
            return ToolResult(f"unknown tool {tool!r}: there are bash\n", exit_code=2)
        command = arguments.get("command")
        if not isinstance(command, str) or len(arguments) != 1:
            return ToolResult("bash takes command (str)\n", exit_code=2)
        result = self._bash(command, self.files)
        return ToolResult(result) if isinstance(result, str) else result

    async def upload(self, path: str, content: bytes) -> None:
        self._check_running()
        self.files[_inside(path)] = content

    async def download(self, path: str) -> bytes:
        self._check_running()
        try:
            return self.files[_inside(path)]
        except KeyError:
            raise SandboxError(f"read_file in sandbox {self.sandbox_id}: {path!r}: No such file or directory") from None

    async def exec(self, argv: Sequence[str], timeout_s: float, *, cwd: str = "", stdin: bytes = b"") -> ToolResult:
        return await self.call("bash", {"command": shlex.join(argv)}, timeout_s)

    async def stats(self) -> SandboxStats:
        self._check_running()
        return SandboxStats(1, 0, sum(map(len, self.files.values())), 0.0)

    async def stop(self) -> None:
        self.stopped = True
        self.files.clear()

    def _check_running(self) -> None:
        if self.stopped:
            raise SandboxError(f"sandbox {self.sandbox_id} was stopped")


class FakeRuntime:
    """Makes fake sandboxes; ``started`` keeps every one, ``fail_starts`` makes the next so many starts fail."""

    def __init__(self, bash: Bash = cat, fail_starts: int = 0) -> None:
        self.started: list[FakeSandbox] = []
        self.fail_starts = fail_starts
        self._bash = bash

    @property
    def description(self) -> str:
        return "fake"

    async def prepare(self) -> None:
        """Nothing to do."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        check_spec(spec)
        if self.fail_starts > 0:
            self.fail_starts -= 1
            raise SandboxError(f"sandbox {spec.sandbox_id} did not start: the fake was told so")
        if any(s.sandbox_id == spec.sandbox_id and not s.stopped for s in self.started):
            raise SandboxError(f"there is a sandbox {spec.sandbox_id!r} already")
        sandbox = FakeSandbox(spec, self._bash)
        self.started.append(sandbox)
        return sandbox

    async def close(self) -> None:
        for sandbox in self.started:
            await sandbox.stop()


def _inside(path: str) -> str:
    full = posixpath.normpath(posixpath.join(WORKSPACE, path))
    if not full.startswith(WORKSPACE + "/"):
        raise SandboxError(f"the path {path!r} leaves the workspace: expected a file below {WORKSPACE}")
    return full.removeprefix(WORKSPACE + "/")
