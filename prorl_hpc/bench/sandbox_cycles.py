"""Many sandboxes, one after the other, each left in disorder: does anything of them stay?"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from prorl_hpc.bench.figures import Figure
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.sandbox.factory import make_runtime
from prorl_hpc.sandbox.protocol import Runtime, SandboxSpec

_AT_ONCE = 4
_TOLD_EVERY = 100
_CALL_S = 60.0
_DISORDER = (
    "sleep 3600 & setsid sleep 3600 & (trap '' TERM HUP INT; sleep 3600) & mkdir -p a/b; touch a/b/c; "
    "chmod 0 a/b a; ln -s / up; touch /dev/shm/x"
)


async def cycles(count: int, say: Say, kind: str = "apptainer") -> list[Figure]:
    """Start, disorder, stop; ``_AT_ONCE`` at a time."""
    with scratch_directory() as directory:
        runtime = await make_runtime(SandboxConfig(kind=kind, start_retries=0), directory, "bench")
        try:
            await _cycle(runtime, 0)  # what the first one brings once: threads, imports
            before = _belongings(directory)
            for start in range(1, count + 1, _AT_ONCE):
                numbers = range(start, min(start + _AT_ONCE, count + 1))
                await asyncio.gather(*(_cycle(runtime, number) for number in numbers))
                if numbers[-1] % _TOLD_EVERY < _AT_ONCE:
                    say(f"cycles: {numbers[-1]} of {count}")
            left = _belongings(directory) - before
        finally:
            await runtime.close()
    for what in sorted(left):
        say(f"left over: {what}")
    detail = "processes, zombies, file descriptors, mounts, sockets, files, directories, control groups"
    return [Figure.exactly("left over", float(left.total()), 0, "", f"{count} starts and stops", detail)]


async def _cycle(runtime: Runtime, number: int) -> None:
    sandbox = await runtime.start(SandboxSpec(f"cycle-{number}"))
    await sandbox.call("bash", {"command": _DISORDER}, _CALL_S)
    await sandbox.stop()


def _belongings(directory: Path) -> Counter[str]:
    """Everything that a sandbox could leave behind, of this process's and of its runtime directory's."""
    return Counter(_named(directory))


def _named(directory: Path) -> Iterator[str]:
    name = str(directory)
    for child in psutil.Process().children(recursive=True):
        yield f"process {child.pid}"
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        words = [*(process.info["cmdline"] or []), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(name in word for word in words):
            yield f"process {process.pid}"
    yield from (f"file descriptor {fd.name}" for fd in Path("/proc/self/fd").iterdir())
    for table in ("mounts", "net/unix"):
        lines = Path(f"/proc/self/{table}").read_text().splitlines()
        yield from (f"{table} {line}" for line in lines if name in line)
    for root, directories, files in os.walk(name):
        yield from (f"file {root}/{entry}" for entry in (*directories, *files))
    for mount in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind = mount.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            # Groups are named after the box's directory, and lie a few levels down.
            for group in Path(place).glob(f"**/*{directory.name}*"):
                yield f"control group {group}"
