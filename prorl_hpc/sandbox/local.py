"""The local runtime: the tool server as a plain process in a private directory. It isolates NOTHING.

For machines without Apptainer, and for tests. Commands run as this user, with the user's files and network in
reach; only the environment is scrubbed.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import ptyprocess

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import CODE, SHELL_PATH, AttachedRuntime, Launch, socket_environment
from prorl_hpc.sandbox.directories import MARKER, Box
from prorl_hpc.sandbox.protocol import SandboxSpec

log = logging.getLogger(__name__)

WARNING = (
    "sandbox.kind=local ISOLATES NOTHING: what the model writes runs as this user, with this user's files and "
    "network. Use it only with models and tasks that you trust, or install Apptainer (scripts/install_apptainer.sh)"
)


SITE = str(Path(ptyprocess.__file__).parents[1])


class LocalRuntime(AttachedRuntime):
    """Sandboxes in name only."""

    @property
    def description(self) -> str:
        return "local (no isolation)"

    async def _prepare(self, holding: Path) -> None:
        log.warning(WARNING)

    async def _let_go(self) -> None:
        """It takes nothing."""

    async def _launch(self, spec: SandboxSpec, box: Box) -> Launch:
        for path, place in spec.binds.items():
            if path != place:
                raise SandboxError(
                    f"the directory {path} cannot be at {place} in a local sandbox, which sees the node's own paths: ask for "
                    f"{path} alone, or use sandbox.kind=apptainer"
                )
        private = {MARKER: str(box.path), "HOME": str(box.tmp), "TMPDIR": str(box.tmp), "LANG": "C.UTF-8"}
        inside = {"PATH": SHELL_PATH, **private, **socket_environment(spec.sockets), **spec.env}
        settings = self._settings(str(box.workspace), str(box.socket_dir), inside, inherit_env=False)
        env = {"PATH": SHELL_PATH, **private}
        if "LD_LIBRARY_PATH" in os.environ:  # a Python from a module system may need it to start
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        argv = [sys.executable, "-I", "-S", str(CODE / "start.py"), SITE, "", str(box.socket)]
        return Launch(argv, env, settings)
