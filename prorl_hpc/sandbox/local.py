"""The local runtime: the tool server as a plain process in a private directory. It isolates NOTHING.

For machines without Apptainer, and for tests. Commands run as this user, with the user's files and network in
reach; only the environment is scrubbed.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from prorl_hpc.sandbox.attached import ServerSettings
from prorl_hpc.sandbox.attached_runtime import SHELL_PATH, TOOL_SERVER, AttachedRuntime, Launch
from prorl_hpc.sandbox.directories import MARKER, Box
from prorl_hpc.sandbox.protocol import SandboxSpec

log = logging.getLogger(__name__)

WARNING = (
    "sandbox.kind=local ISOLATES NOTHING: what the model writes runs as this user, with this user's files and "
    "network. Use it only with models and tasks that you trust, or install Apptainer (scripts/install_apptainer.sh)"
)


class LocalRuntime(AttachedRuntime):
    """Sandboxes in name only."""

    @property
    def description(self) -> str:
        return "local (no isolation)"

    async def _prepare(self, holding: Path) -> None:
        log.warning(WARNING)

    def _launch(self, spec: SandboxSpec, box: Box) -> Launch:
        private = {MARKER: str(box.path), "HOME": str(box.tmp), "TMPDIR": str(box.tmp), "LANG": "C.UTF-8"}
        settings = ServerSettings(
            root=str(box.workspace),
            socket=str(box.socket),
            env={"PATH": SHELL_PATH, **private, **spec.env},
            inherit_env=False,
            output_limit_bytes=self._config.output_limit_bytes,
            limits=self._limits(),
        )
        env = {"PATH": SHELL_PATH, **private}
        if "LD_LIBRARY_PATH" in os.environ:  # a Python from a module system may need it to start
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        return Launch([sys.executable, "-I", "-S", str(TOOL_SERVER)], env, settings)
