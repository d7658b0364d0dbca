"""Choose the runtime that the configuration asks for."""

from __future__ import annotations

import logging
from pathlib import Path

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.apptainer import ApptainerRuntime
from prorl_hpc.sandbox.images.resolving import HOST_IMAGE
from prorl_hpc.sandbox.local import LocalRuntime
from prorl_hpc.sandbox.protocol import Runtime

log = logging.getLogger(__name__)

KINDS = ("auto", "apptainer", "local")


async def make_runtime(config: SandboxConfig, runtime_dir: Path, run_id: str) -> Runtime:
    """A prepared runtime. ``auto``: containers where they work, else local with a warning and the reason.

    Raises SandboxError when the kind that was asked for does not work here; it says what is missing.
    """
    log.info("run %s: preparing sandboxes (%s) in %s", run_id, config.kind, runtime_dir)
    if config.kind not in KINDS:
        raise SandboxError(f"sandbox.kind={config.kind!r} is unknown; allowed: {', '.join(KINDS)}")
    if config.kind != "local":
        runtime = ApptainerRuntime(config, runtime_dir)
        try:
            await runtime.prepare()
        except SandboxError as error:
            if config.kind == "apptainer":
                raise
            log.warning("containers do not work here, falling back to sandbox.kind=local: %s", error)
            if config.image != HOST_IMAGE:
                log.warning("sandbox.image=%s is not used: local sandboxes see this machine's own files", config.image)
        else:
            return runtime
    local = LocalRuntime(config, runtime_dir)
    await local.prepare()
    return local
