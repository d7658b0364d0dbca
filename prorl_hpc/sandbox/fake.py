"""An in-memory runtime for tests of tasks and of other rooms: files in a dict, tools by functions."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import check_spec
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, SandboxStats, ToolResult

WORKSPACE = "/workspace"
Bash = Callable[[str, dict[str, bytes]], ToolResult | str]
"""(command, files by path within the workspace) → the result, or just its output. The files may be changed."""
Tool = Callable[[dict[str, Any], dict[str, bytes]], ToolResult | str]
"""(arguments, files by path within the workspace) → the result, or just its output."""
_BASH_OPTIONS = {"shell": str, "interactive": bool, "keep": bool}


def cat(command: str, files: dict[str, bytes]) -> ToolResult:
    """The default ``bash``: knows ``cat FILE``."""
    words = command.split()
    if len(words) == 2 and words[0] == "cat" and words[1] in files:
        return ToolResult(files[words[1]].decode())
    return ToolResult(f"fake bash: cannot run {command!r}\n", exit_code=127)


class FakeSandbox:
    """One fake sandbox; ``calls`` lists what was asked of it. ``tools``: those besides bash, by name."""

    def __init__(
        self, spec: SandboxSpec | None = None, bash: Bash = cat, tools: Mapping[str, Tool] | None = None
    ) -> None:
        self.spec = spec or SandboxSpec("fake")
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.stopped = False
        self._bash = bash
        self._tools = tools or {}

    @property
    def sandbox_id(self) -> str:
        return self.spec.sandbox_id

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        self._check_running()
        self.calls.append((tool, arguments))
        if tool in self._tools:
            result = self._tools[tool](arguments, self.files)
        elif tool == "bash":
            options = {name: value for name, value in arguments.items() if name != "command"}
            known = all(isinstance(value, _BASH_OPTIONS.get(name, ())) for name, value in options.items())
            if not known or not isinstance(arguments.get("command"), str):
                return ToolResult("bash takes command (str), shell (str), interactive, keep (bool)\n", exit_code=2)
            result = self._bash(arguments["command"], self.files)
        else:
            names = ", ".join(sorted({"bash", *self._tools}))
            return ToolResult(f"unknown tool {tool!r}: there are {names}\n", exit_code=2)
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

    def __init__(self, bash: Bash = cat, fail_starts: int = 0, tools: Mapping[str, Tool] | None = None) -> None:
        self.started: list[FakeSandbox] = []
        self.fail_starts = fail_starts
        self._bash = bash
        self._tools = tools

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
        sandbox = FakeSandbox(spec, self._bash, self._tools)
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
