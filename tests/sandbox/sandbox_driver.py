"""A worker in small, for tests: runs steps in sandboxes and prints what they gave.

``python sandbox_driver.py < JOB > RESULTS``, both JSON. A process of its own, so that it can be an ordinary user's,
and can have an environment with secrets in it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import apptainer
from prorl_hpc.sandbox.local import LocalRuntime
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec


async def run(job: dict[str, Any]) -> dict[str, Any]:
    """``unprepared``: why no sandbox can be started; else one of ``results`` for each step."""
    if job["kit"]:
        apptainer.ensure_kit = lambda *_: Path(job["kit"])
    kind = LocalRuntime if job["kind"] == "local" else apptainer.ApptainerRuntime
    runtime = kind(SandboxConfig(start_retries=0, **job["config"]), Path(job["runtime_dir"]))
    try:
        await runtime.prepare()
    except SandboxError as error:
        return {"unprepared": str(error)}
    sandboxes: dict[str, Sandbox] = {}
    results = []
    try:
        for name, what, *rest in job["steps"]:
            if name not in sandboxes:
                sandboxes[name] = await runtime.start(SandboxSpec(name))
            try:
                results.append(await step(sandboxes[name], what, rest))
            except SandboxError as error:
                results.append({"error": str(error)})
    finally:
        await runtime.close()
    return {"results": results}


async def step(sandbox: Sandbox, what: str, rest: list[Any]) -> dict[str, Any]:
    if what == "call":
        tool, arguments, timeout_s = rest
        result = await sandbox.call(tool, arguments, timeout_s)
        return {"output": result.output, "exit_code": result.exit_code, "timed_out": result.timed_out}
    if what == "upload":
        await sandbox.upload(rest[0], rest[1].encode())
        return {}
    if what == "download":
        return {"output": (await sandbox.download(rest[0])).decode(errors="replace")}
    if what == "stats":
        return vars(await sandbox.stats())
    await sandbox.stop()
    return {}


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
