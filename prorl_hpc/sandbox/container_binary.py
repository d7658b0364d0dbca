"""Find the container program of this node: Apptainer, or Singularity, its elder."""

from __future__ import annotations

import os
import shutil

from prorl_hpc.messages.errors import SandboxError

BINARIES = ("apptainer", "singularity")


def find_binary() -> str:
    """Its path. SandboxError when there is none."""
    for name in BINARIES:
        found = shutil.which(name)
        if found:
            return os.path.abspath(found)  # noqa: PTH100  (links stay: an apptainer may be known by its name)
    raise SandboxError(
        "neither apptainer nor singularity is on PATH: load the site's module (cluster.setup can hold the line), run "
        "scripts/install_apptainer.sh as root on Debian or Ubuntu, or set sandbox.kind=local, which isolates nothing"
    )
