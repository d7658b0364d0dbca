"""``agent``: a program that talks to a language model, with a door on loopback to the socket of the model's gateway."""

from __future__ import annotations

import json
import os
import time

from prorl_hpc.sandbox.tools.children import Child, Collected, program
from prorl_hpc.sandbox.tools.processes import adopt_orphans
from prorl_hpc.sandbox.tools.shell_process import environment
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, ClassVar

RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent_runner.py")
MOST_BYTES = 1 << 20
"""Of the runner's report, which bounds what it quotes."""


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {
        "agent": {"command": list, "env": dict, "files": dict, "values": dict, "socket": str}
    }

    def __init__(self, host: Host) -> None:
        self._host = host
        self._env = environment(host)

    def agent(self, call: Call, **job: Any) -> Generator[float, None, Answer]:
        """Do the job (agent_runner.py says what it has) in the workspace, and answer with the runner's report. At the time
        limit, or when the call is cancelled, runner and program are killed with all that they started."""
        argv = [*self._host.program("python3"), "-I", "-S", RUNNER]
        start = program(argv, self._host.settings.root, self._env)

        def body() -> int:
            adopt_orphans()
            return start()

        report, errors = Collected(MOST_BYTES), Collected(MOST_BYTES)
        child = Child(self._host, body, report.add, errors.add, json.dumps(job).encode())
        code = yield from child.wait(call, time.monotonic() + call.timeout_s)
        said = report.data if code == 0 else report.data + errors.data
        return Answer(bytes(said).decode("utf-8", "replace"), code, timed_out=code is None)
