"""Which cluster the Slurm of this machine is: the same job id means another job on another one."""

from __future__ import annotations

import functools
import re
import subprocess
import time

from prorl_hpc.messages.errors import RunError

_LIMIT_S = 20.0


class ClusterQuestion:
    """Asked when it is made, so that others can be asked meanwhile; ``answer`` waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._deadline = time.monotonic() + _LIMIT_S
        try:
            self._process = subprocess.Popen(
                ["scontrol", "show", "config"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for whoever asks
            )
        except FileNotFoundError:
            pass  # no Slurm here: answer is empty

    def answer(self) -> str:
        """ClusterName; empty if it was not told."""
        if self._process is None:
            return ""
        try:
            said, _ = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return ""
        found = re.search(r"^ClusterName\s*=\s*(\S+)", said, re.MULTILINE)
        return found[1] if found else ""


@functools.cache
def this_cluster() -> str:
    """Its name; asked once. Raises RunError, and asks again the next time, if it is not told."""
    if name := ClusterQuestion().answer():
        return name
    raise RunError("the Slurm of this machine does not tell the name of its cluster (`scontrol show config`)")
