"""``exec``: a program by itself, beside the shells and with nothing of their state."""

from __future__ import annotations

import os
import time

from prorl_hpc.sandbox.tools.children import Child, program
from prorl_hpc.sandbox.tools.output import BoundedOutput
from prorl_hpc.sandbox.tools.processes import adopt_orphans
from prorl_hpc.sandbox.tools.shell_process import environment
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, ClassVar


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {"exec": {"argv": list, "cwd": "", "env": {}}}

    def __init__(self, host: Host) -> None:
        self._host = host
        self._env = environment(host)

    def exec(
        self, call: Call, argv: list[Any], cwd: str = "", env: dict[str, Any] | None = None
    ) -> Generator[float, None, Answer]:
        """Run ``argv`` with the call's body as its stdin; ``cwd`` is relative to the workspace, ``env`` is added.
        What it leaves in the background goes on; at the time limit it is killed with all that it started."""
        _check(argv, cwd, env or {})
        settings = self._host.settings
        start = program(argv, os.path.join(settings.root, cwd), {**self._env, **(env or {})})

        def body() -> int:
            os.dup2(1, 2)  # one pipe, so that the order is kept
            adopt_orphans()
            return start()

        output = BoundedOutput(settings.output_limit_bytes)
        deadline = time.monotonic() + call.timeout_s
        child = Child(self._host, body, output.add, output.add, call.body)
        code = yield from child.wait(call, deadline)
        text = output.text(settings.strip_ansi)
        if code is None:
            why = "cancelled" if call.cancelled else "timed out"
            text += ("\n" if text and not text.endswith("\n") else "") + f"[{why}: the program was killed]\n"
        return Answer(text, code, timed_out=code is None)


def _check(argv: list[Any], cwd: str, env: dict[str, Any]) -> None:
    if not argv or not all(isinstance(word, str) for word in argv):
        raise Refused(f"exec takes argv as a list of texts, the program's name first, not {argv!r}")
    if not all(isinstance(value, str) for value in env.values()):
        raise Refused("exec takes env as an object of texts")
    if any("\0" in text for text in (*argv, cwd, *env, *env.values())) or any("=" in name or not name for name in env):
        raise Refused("exec was given a NUL byte, or a variable's name that is empty or has '=' in it")
