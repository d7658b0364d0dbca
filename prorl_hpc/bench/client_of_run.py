"""The service's client for a process that is none of the run's own."""

from __future__ import annotations

from prorl_hpc.bench.testbed import Testbed
from prorl_hpc.observe.process import Process
from prorl_hpc.service.client import RolloutClient


def service_client(bed: Testbed) -> RolloutClient:
    """Over HTTP; it finds a coordinator that was started anew."""
    config = bed.run.load_config()
    process = Process("bench", "client", bed.run, config, bed.run.runtime_dir(config.run.runtime_root))
    return RolloutClient.for_run(process, patience_s=120.0)
