"""The sandboxes' part of `prorl-hpc doctor`: what isolates and limits them on this machine, by a trial of each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prorl_hpc.cli.findings import Finding
from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.apptainer import ApptainerRuntime
from prorl_hpc.sandbox.cgroups import Cgroups
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.host_image import make_host_image
from prorl_hpc.sandbox.limits import held_here
from prorl_hpc.sandbox.protocol import Runtime, SandboxSpec, ToolResult

_SMALL = SandboxConfig(max_processes=64, max_memory_mib=128, max_disk_mib=16, max_file_mib=256, start_retries=0)
_TRIAL_S = 20.0
_DELEGATE = (
    "for the kernel's own limits, the admin gives users a cgroup v2 subtree: Delegate=cpu memory pids for user@.service, "
    "`loginctl enable-linger USER`; start workers with `systemd-run --user --scope`. In Slurm jobs, ConstrainRAMSpace=yes "
    "and ConstrainCores=yes hold the job as a whole"
)
_LOOK = "grep -c : /proc/net/dev; grep CapEff /proc/self/status; grep Seccomp: /proc/self/status"
_GREEDY = {
    "memory": ("bash -c 'x=$(head -c 400M /dev/zero | tr \"\\\\0\" x)'", ("of memory",)),
    # The sandbox is ended with a sentence, or the shell's fork is refused for as long as the call lasts.
    "processes": (
        "for n in $(seq 80); do sleep 5 & done; wait",
        ("processes that are allowed", "Resource temporarily"),
    ),
    "disk": ("head -c 40M /dev/zero > big; sleep 2", ("of disk",)),
}
"""Limit → (what goes beyond it, words of which the answer has one)."""


@dataclass
class Trial:
    """What sandboxes did here. ``failed``: why none started."""

    failed: str = ""
    ready_s: float = 0.0
    look: str = ""
    writable: str = ""
    """Why the image cannot be written over; empty when it can."""
    said: dict[str, str] = field(default_factory=dict)
    """Limit → the answer of the sandbox that went beyond it."""


def examine_sandboxes() -> Iterator[Finding]:
    """Starts some small sandboxes at once; takes a second or two."""
    try:
        binary = find_binary()
    except SandboxError as error:
        yield Finding("warn", "sandbox trial", "none was made", str(error))
        return
    with tempfile.TemporaryDirectory(prefix=f"prorl-{os.getuid()}-d", dir="/tmp") as directory:
        with _quiet():
            trial = asyncio.run(_try(Path(directory)))
        if trial.failed:
            yield Finding("warn", "sandbox trial", *_parted(trial.failed))
            return
        yield Finding("ok", "sandbox trial", f"one of five that started at once was ready in {trial.ready_s:.2f} s")
        yield from _isolation(trial)
        yield _sif(binary, Path(directory))
    yield from _limits(trial)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What starts or dies meanwhile is the trial's, and no news."""
    logger = logging.getLogger("prorl_hpc.sandbox")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _try(directory: Path) -> Trial:
    trial = Trial()
    runtime = ApptainerRuntime(_SMALL, directory)
    try:
        await runtime.prepare()
        await asyncio.gather(
            _look(runtime, trial), _write_over(runtime, trial), *(_exceed(runtime, trial, limit) for limit in _GREEDY)
        )
    except SandboxError as error:
        trial.failed = str(error)
    finally:
        await runtime.close()
    return trial


async def _bash(runtime: Runtime, spec: SandboxSpec, command: str) -> ToolResult:
    sandbox = await runtime.start(spec)
    return await sandbox.call("bash", {"command": command}, _TRIAL_S)


async def _look(runtime: Runtime, trial: Trial) -> None:
    began = time.monotonic()
    sandbox = await runtime.start(SandboxSpec("look"))
    trial.ready_s = time.monotonic() - began
    trial.look = (await sandbox.call("bash", {"command": _LOOK}, _TRIAL_S)).output


async def _write_over(runtime: Runtime, trial: Trial) -> None:
    try:
        result = await _bash(runtime, SandboxSpec("write", writable="image"), "touch /opt/new 2>&1")
    except SandboxError as error:
        trial.writable = str(error)
    else:
        trial.writable = result.output.strip() if result.exit_code else ""


async def _exceed(runtime: Runtime, trial: Trial, limit: str) -> None:
    sandbox = await runtime.start(SandboxSpec(limit))
    try:
        trial.said[limit] = (await sandbox.call("bash", {"command": _GREEDY[limit][0]}, _TRIAL_S)).output
    except SandboxError as error:  # the sandbox itself went: that, too, is held
        trial.said[limit] = str(error)


def _parted(reason: str) -> tuple[str, str]:
    """(what happened, what to do about it)."""
    found, _, cure = reason.strip().rpartition("\n")
    return (found.replace("\n", " "), cure) if found else (cure, "")


def _isolation(trial: Trial) -> Iterator[Finding]:
    devices, capabilities, seccomp = (trial.look.split("\n") + [""] * 3)[:3]
    if devices == "1":
        yield Finding("ok", "network none", "a sandbox has a loopback of its own and nothing else")
    else:
        cure = "sandbox.network=none does not hold: ask the admin to allow `--net --network none` to users"
        yield Finding("warn", "network none", f"a sandbox has {devices} network devices", cure)
    if re.search(r"0{16}$", capabilities) and seccomp.endswith("2"):
        yield Finding("ok", "confinement", "no capabilities inside, no user namespaces, /proc is closed to root")
    else:
        found = f"{' '.join(capabilities.split())}, {' '.join(seccomp.split())}"
        yield Finding(
            "warn", "confinement", found, "agents can make user namespaces inside: keep the kernel up to date"
        )
    if trial.writable:
        yield Finding("warn", "writable=image", *_parted(trial.writable))
    else:
        yield Finding("ok", "writable=image", "an image can be written over")


def _sif(binary: str, directory: Path) -> Finding:
    """Whether a .sif starts without being unpacked: makes one and starts it."""
    cure = (
        "/dev/fuse must be open to users and squashfuse be installed; until then set sandbox.unpack_images=true, "
        "which needs neither"
    )
    image = directory / "image"
    binds = [option for path in make_host_image(image) for option in ("--bind", f"{path}:{path}:ro")]
    root = ["--userns"] if os.getuid() == 0 else []
    environment = {"PATH": f"{Path(binary).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(directory)}
    for command in (
        [binary, "-q", "build", f"{image}.sif", str(image)],
        [binary, "-q", "exec", *root, "--containall", *binds, f"{image}.sif", "/usr/bin/true"],
    ):
        try:
            done = subprocess.run(
                command, env=environment, cwd=directory, capture_output=True, text=True, timeout=_TRIAL_S
            )
        except subprocess.TimeoutExpired:
            return Finding("warn", "sif images", f"`{command[2]}` gave no answer in {_TRIAL_S:.0f} s", cure)
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            return Finding("warn", "sif images", f"`{command[2]}` of one failed: {said}", cure)
    return Finding("ok", "sif images", "start as they are, over FUSE")


def _limits(trial: Trial) -> Iterator[Finding]:
    for held in held_here(Cgroups.find()):
        subject = f"{held.limit} limit"
        if not held.by:
            yield Finding("warn", subject, "none: nothing here can hold it", _DELEGATE)
        elif held.limit in _GREEDY and not any(w in trial.said.get(held.limit, "") for w in _GREEDY[held.limit][1]):
            found = f"{held.by} did not hold it: {trial.said.get(held.limit, '').strip()[-200:]!r}"
            yield Finding("warn", subject, found, "tell the project, with the lines above")
        elif held.limit == "memory" and "cgroup" not in held.by:
            yield Finding("warn", subject, f"{held.by}, which looks ten times a second", _DELEGATE)
        else:
            yield Finding("ok", subject, held.by)
