"""``upload`` and ``download``, and the paths that every file tool goes through."""

from __future__ import annotations

import os
import stat

from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

WORKSPACE = "/workspace"
"""How paths name the root, even where it is another directory."""


class Workspace:
    """Paths within the workspace, links followed as far as they stay in it."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    def resolve(self, path: str) -> str:
        inside = path
        if path == WORKSPACE or path.startswith(WORKSPACE + "/"):
            inside = path[len(WORKSPACE) :].lstrip("/")
        real = os.path.realpath(os.path.join(self._root, inside))
        if "\0" in path or not real.startswith(self._root + "/"):
            raise Refused(f"the path {path!r} leaves the workspace: expected a file below {WORKSPACE}")
        return real

    def open(self, path: str, flags: int) -> int:
        """A file descriptor. Never waits (a FIFO would) and follows no link at the end of the path."""
        try:
            fd = os.open(self.resolve(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise Refused(f"{path!r}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Refused(f"{path!r} is not a regular file")
        return fd


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {
        "upload": {"path": str, "append": False},
        "download": {"path": str, "offset": 0, "length": 1 << 20},
    }

    def __init__(self, host: Host) -> None:
        self._workspace = Workspace(host.settings.root)

    def upload(self, call: Call, path: str, append: bool = False) -> Answer:
        """Write the call's body into a file, making its directories."""
        try:
            os.makedirs(os.path.dirname(self._workspace.resolve(path)), exist_ok=True)
        except OSError as error:
            raise Refused(f"the directory of {path!r} cannot be made: {error.strerror}") from None
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        with os.fdopen(self._workspace.open(path, flags), "wb") as file:
            file.write(call.body)
        return Answer()

    def download(self, call: Call, path: str, offset: int = 0, length: int = 1 << 20) -> Answer:
        """``length`` bytes of a file from ``offset``; fewer at its end."""
        with os.fdopen(self._workspace.open(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, offset))
            return Answer(file.read(max(0, length)))
