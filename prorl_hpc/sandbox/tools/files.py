"""``upload`` and ``download``: exact bytes, piece by piece."""

from __future__ import annotations

import os

from prorl_hpc.sandbox.tools.framing import MAX_BODY_BYTES
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused
from prorl_hpc.sandbox.tools.workspace import Workspace, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {
        "upload": {"path": str, "append": False},
        "download": {"path": str, "offset": 0, "length": 1 << 20},
    }

    def __init__(self, host: Host) -> None:
        self._workspace = Workspace(host)

    def upload(self, call: Call, path: str, append: bool = False) -> Answer:
        """Write the call's body into a file, making its directories. What cannot be appended whole is not appended."""
        fd = self._workspace.open(path, os.O_WRONLY | os.O_CREAT | (0 if append else os.O_TRUNC))
        try:
            before = os.lseek(fd, 0, os.SEEK_END)
            try:
                self._workspace.write(fd, call.body, path)
            except Refused:
                os.ftruncate(fd, before)
                raise
        finally:
            os.close(fd)
        return Answer()

    def download(self, call: Call, path: str, offset: int = 0, length: int = 1 << 20) -> Answer:
        """``length`` bytes of a file from ``offset``; fewer at its end."""
        if offset < 0 or not 0 <= length <= MAX_BODY_BYTES:
            raise Refused(
                f"offset {offset}, length {length}: expected at least 0, and a length of at most {MAX_BODY_BYTES}"
            )
        fd = self._workspace.open(path, os.O_RDONLY)
        try:
            content = bytearray()
            while len(content) < length and (more := os.pread(fd, length - len(content), offset + len(content))):
                content += more
            return Answer(bytes(content))
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError):
                raise refusal(path, error) from None
            raise Refused(f"offset {offset} is beyond what a file can have") from None
        finally:
            os.close(fd)
