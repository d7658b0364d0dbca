"""Runs a series on a Slurm cluster of this machine's own, whose nodes are namespaces: from its login node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from prorl_hpc.bench.launch_cluster import private_cluster
from prorl_hpc.bench.parts import Say
from prorl_hpc.bench.scaling_records import Series
from prorl_hpc.bench.testbed import scratch_directory
from prorl_hpc.config.model_directory import prorl_home
from prorl_hpc.messages.errors import ConfigError, RunError
from prorl_hpc.slurm.private.base import missing
from prorl_hpc.slurm.private.shape import MOST_NODES


def nodes_needed(series: Series) -> int:
    """Of the cluster: a point has as many CPU nodes as inference nodes. Raises ConfigError for more than there can be."""
    most = max(spec.nodes for spec in series.points)
    if 2 * most > MOST_NODES:
        raise ConfigError(
            f"nodes={most}: a cluster of this machine's own has at most {MOST_NODES} nodes, and a point needs as many "
            f"inference nodes as CPU nodes: nodes= at most {MOST_NODES // 2}, and --simulate nodes=… beyond"
        )
    return 2 * most


def run_in_private_cluster(series: Series, folder: Path, words: Sequence[str], say: Say) -> int:
    """The exit code of the same command on the login node; the cluster is gone afterwards. Raises ConfigError or RunError
    where there can be no such cluster."""
    nodes = nodes_needed(series)
    if reason := missing("namespaced"):
        raise RunError(f"--private: no Slurm cluster of this machine's own: {reason}. --local needs none")
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_directory() as directory:
        say(f"a Slurm cluster of this machine's own with {nodes} nodes starts")
        with private_cluster(directory, folder, prorl_home(), cpu_nodes=nodes, gpu_nodes=0) as cluster:
            own = [word for word in words if not word.startswith("out=")]
            command = [sys.executable, "-m", "prorl_hpc", "bench", "scaling", *own, f"out={folder}", "--inside"]
            with subprocess.Popen(cluster.command(command)) as inner:
                try:
                    return inner.wait()
                except BaseException:
                    inner.terminate()
                    raise
