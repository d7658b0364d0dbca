"""Whether sandboxes have what ``sandbox.shell=tmux`` needs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import SHELL_PATH
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.images.resolving import HOST_IMAGE, resolve

_LOOK_S = 60.0
_CURE = "install tmux there, use another image, or set sandbox.shell=own"


def shell_problems(config: ProrlConfig) -> Iterator[str]:
    """tmux is looked for in ``sandbox.image`` (for ``host`` and local sandboxes: on this machine, where these are).
    Elsewhere, and in images of single prompts, a worker's first sandbox of the kind tells."""
    sandbox = config.sandbox
    if sandbox.shell != "tmux":
        return
    if sandbox.kind == "local" or sandbox.image == HOST_IMAGE:
        if config.cluster.kind == "local" and shutil.which("tmux", path=SHELL_PATH) is None:
            yield f"sandbox.shell=tmux: this machine has no tmux in {SHELL_PATH}: {_CURE}"
        return
    try:
        binary, image = find_binary(), resolve(sandbox.image)
    except SandboxError:
        return  # the preflight of images tells, or they are the compute nodes' alone
    if not _has_tmux(binary, image):
        yield f"sandbox.shell=tmux: the image {sandbox.image} has no tmux on its PATH: {_CURE}"


def _has_tmux(binary: str, image: Path) -> bool:
    """Asked of the image's own shell; true as well where it cannot be asked: a worker says why no sandbox starts."""
    argv = [
        binary,
        "-q",
        "-s",
        "exec",
        "--containall",
        "--no-home",
        str(image),
        "/bin/sh",
        "-c",
        "command -v tmux || echo none",
    ]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_LOOK_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 0 or done.stdout.strip() != "none"
