"""``python -m fakes.submitting RUN_DIR``, on the login node: submits a run whose processes are fakes, or with ``--real``
the real ones. Prints the job's id."""

from __future__ import annotations

import sys
from pathlib import Path

from fakes.runs import fake_plan

from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.slurm.executors import submit
from prorl_hpc.slurm.plan import make_plan

run = RunDirectory.open(Path(sys.argv[1]))
config = run.load_config()
plan = make_plan(config) if "--real" in sys.argv else fake_plan(config)
print(submit(run, config, plan).record.job_id)
