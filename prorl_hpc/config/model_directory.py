"""Where models lie, and what a directory must hold to be one."""

from __future__ import annotations

import os
from pathlib import Path


def prorl_home() -> Path:
    """This user's directory for things that outlive a run: ``$PRORL_HOME``, else ``$XDG_CACHE_HOME/prorl_hpc``,
    else ``~/.cache/prorl_hpc``. On a cluster it must be one that all nodes see."""
    if home := os.environ.get("PRORL_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")  # the XDG specification: relative paths are to be ignored
    return (Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache") / "prorl_hpc"


def prepared_model(name: str) -> Path:
    """Where ``prorl_hpc model prepare NAME`` puts its model; the directory exists once it is whole."""
    return prorl_home() / "models" / name
