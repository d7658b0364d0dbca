"""What a tool is: a method of a tool set, with a signature that calls are checked against.

A tool set is a class with ``TOOLS`` (tool → its parameters) and, for each tool, a method of that name, called with
the Call and the arguments. The method returns an Answer, or is a generator that returns one and yields deadlines in
between (see loop.py). It raises Refused when it was called wrongly, OSError when the sandbox does not let it work.
A module of tools is imported when one of its tools is first called: a sandbox that never plots pays for no kernel.
"""

from __future__ import annotations

import os
import sys

from prorl_hpc.sandbox.tools.notices import Notices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from prorl_hpc.sandbox.tools.loop import Loop
    from prorl_hpc.sandbox.tools.reaper import Reaper

MODULES = {
    "shells": ("bash", "bash_input", "bash_interrupt", "bash_look", "bash_close"),
    "execution": ("exec",),
    "outside": ("agent",),
    "ipython": ("ipython", "ipython_interrupt", "ipython_restart"),
    "files": ("upload", "download"),
    "editor": ("edit",),
    "searching": ("search",),
    "patches": ("patch",),
    "usage": ("stats",),
}
"""Module of this package → its tools; each has one class ``Tools``."""
_MODULE_OF = {tool: module for module, tools in MODULES.items() for tool in tools}


class Refused(Exception):
    """A tool was called wrongly; the message is for the agent: what was given, what is allowed, what to do."""


class Settings:
    """What the worker asks of this sandbox; the first frame. See ``ServerSettings`` on the worker's side."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.root: str = given["root"]
        self.env: dict[str, str] = given["env"]
        self.inherit_env: bool = given["inherit_env"]
        self.output_limit_bytes: int = given["output_limit_bytes"]
        self.strip_ansi: bool = given["strip_ansi"]
        self.ipython_mode: str = given["ipython_mode"]
        self.open_paths: bool = given["open_paths"]
        self.scratch: str = given["scratch"]
        self.limits: dict[str, int] = given["limits"]
        self.shell: str = given.get("shell", "own")
        self.tmux_poll_s: float = given.get("tmux_poll_s", 0.5)


class Host:
    """What the server gives to its tool sets."""

    def __init__(
        self, settings: Settings, loop: Loop, reaper: Reaper, kit: str, notices: Notices | None = None
    ) -> None:
        self.settings = settings
        self.loop = loop
        self.reaper = reaper
        self.kit = kit
        """The directory with our own Python, bash and git, or empty where the node's are used (``local``)."""
        self.notices = Notices() if notices is None else notices
        """What was done to the sandbox as a whole; appended to the output of the calls that run then."""
        self.idle: set[int] = set()
        """Interpreters that run no cell: what exceeds a limit is likely something else."""

    def program(self, name: str) -> list[str]:
        """How ``python3``, ``bash`` or ``git`` of our own is started, whatever the image has: the head of an argv.
        Empty where there is none."""
        if not self.kit:
            if name == "python3":
                return [sys.executable]
            found = (f"{directory}/{name}" for directory in os.get_exec_path(self.settings.env))
            return [path for path in found if os.access(path, os.X_OK)][:1]
        if not os.path.exists(f"{self.kit}/bin/{name}"):
            return []
        return [f"{self.kit}/ld.so", "--library-path", f"{self.kit}/lib", f"{self.kit}/bin/{name}"]


class Call:
    """One call under way. ``timeout_s`` is the caller's; ``cancelled`` is set when the caller gave up: answer soon."""

    def __init__(self, number: int, tool: str, timeout_s: float, body: bytes) -> None:
        self.number = number
        self.tool = tool
        self.timeout_s = timeout_s
        self.body = body
        self.cancelled = False


class Answer:
    """``output``: text for an agent, or bytes (``download``). ``exit_code`` None: it timed out or still runs."""

    def __init__(
        self,
        output: str | bytes = "",
        exit_code: int | None = 0,
        *,
        timed_out: bool = False,
        running: bool = False,
        cwd: str = "",
        files: list[str] | None = None,
    ) -> None:
        self.output = output
        self.exit_code = exit_code
        self.timed_out = timed_out
        self.running = running
        self.cwd = cwd
        self.files = files or []

    def header(self) -> dict[str, Any]:
        """What is not the default; the output is the body."""
        header: dict[str, Any] = {"exit_code": self.exit_code}
        for name in ("timed_out", "running", "cwd", "files"):
            if value := getattr(self, name):
                header[name] = value
        return header


class ToolBox:
    """All tools, made when they are needed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._made: dict[str, Any] = {}

    def get(self, module: str) -> Any:
        if module not in self._made:
            name = f"{__package__}.{module}"
            __import__(name)  # importlib itself would have to be imported first
            self._made[module] = sys.modules[name].Tools(self._host)
        return self._made[module]

    def find(self, tool: Any, arguments: Any) -> Callable[..., Any]:
        """The tool's method, once the arguments fit it; raises Refused."""
        if tool not in _MODULE_OF:
            raise Refused(f"unknown tool {tool!r}: there are {', '.join(sorted(_MODULE_OF))}")
        tools = self.get(_MODULE_OF[tool])
        check_arguments(tool, tools.TOOLS[tool], arguments)
        method: Callable[..., Any] = getattr(tools, tool)
        return method


def check_arguments(tool: str, parameters: dict[str, Any], arguments: Any) -> None:
    """``parameters``: name → a type (required) or a default value, whose type is asked for. Raises Refused."""
    if not isinstance(arguments, dict):
        raise Refused(f"the arguments are a {type(arguments).__name__}, not an object: {_takes(tool, parameters)}")
    for name, value in arguments.items():
        if name not in parameters:
            raise Refused(f"unknown argument {name!r}: {_takes(tool, parameters)}")
        kind = parameters[name]
        wanted = kind if isinstance(kind, type) else type(kind)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise Refused(f"argument {name} is a {type(value).__name__}: {_takes(tool, parameters)}")
    for name, kind in parameters.items():
        if isinstance(kind, type) and name not in arguments:
            raise Refused(f"argument {name} is missing: {_takes(tool, parameters)}")


def _takes(tool: str, parameters: dict[str, Any]) -> str:
    return f"{tool} takes {', '.join(_written(name, kind) for name, kind in parameters.items()) or 'no arguments'}"


def _written(name: str, kind: Any) -> str:
    return f"{name} ({kind.__name__})" if isinstance(kind, type) else f"{name} ({type(kind).__name__}, else {kind!r})"
