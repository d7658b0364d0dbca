"""All processes that one start of an LLM server has made, wherever they went: found by a mark in their environment.

A process group does not do: vLLM's engine and tensor-parallel workers may make sessions of their own, and would keep the
GPU's memory when their group is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

MARK = "PRORL_LLM_SERVER"


def marked(mark: str) -> list[psutil.Process]:
    """Those that carry ``mark`` and run; this process is never among them. Of other users' processes nothing is known."""
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and _carries(p, mark)]


def kill_marked(mark: str) -> list[psutil.Process]:
    """SIGKILL them; returns those that were still there."""
    found = marked(mark)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return found


def shared_memory_of(mark: str) -> set[Path]:
    """Files of shared memory that these processes have mapped and made: killed, they leave them in the node's memory. The
    weights of an update, which lie there too, are not among them."""
    found: set[Path] = set()
    for process in marked(mark):
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found |= {
                Path(name) for name in re.findall(r"(/dev/shm/(?:vllm|psm_|sem\.mp-|torch_)\S+)$", maps, re.MULTILINE)
            }
    return found


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
