"""The runtimes that the tests of this room go through."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.apptainer import ApptainerRuntime
from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.local import LocalRuntime

KINDS = [pytest.param("local"), pytest.param("apptainer", marks=pytest.mark.apptainer)]
SMALL = SandboxConfig(output_limit_bytes=4096, max_file_mib=8, start_retries=0)


def attached(kind: str, runtime_dir: Path, config: SandboxConfig = SMALL) -> AttachedRuntime:
    return LocalRuntime(config, runtime_dir) if kind == "local" else ApptainerRuntime(config, runtime_dir)


async def prepared(kind: str, runtime_dir: Path, config: SandboxConfig = SMALL) -> AttachedRuntime:
    """Skips, with the reason, where containers do not work at all; what fails with ``config`` alone is a failure."""
    runtime = attached(kind, runtime_dir, config)
    try:
        await runtime.prepare()
    except SandboxError:
        if kind == "apptainer" and (reason := await _why_containers_do_not_work(runtime_dir)):
            pytest.skip(f"apptainer does not work on this machine: {reason}")
        raise
    return runtime


async def _why_containers_do_not_work(runtime_dir: Path) -> str:
    plain = attached("apptainer", runtime_dir)
    try:
        await plain.prepare()
    except SandboxError as error:
        return str(error)
    await plain.close()
    return ""
