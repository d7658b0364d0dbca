"""``python prorl_with_fakes.py VERB …``: the command line as it is, but every process of the plan is a fake one
and the model is not looked at."""

from __future__ import annotations

import sys

from fakes.runs import fake_plan

import prorl_hpc.cli.launch
import prorl_hpc.cli.preflight_model
import prorl_hpc.cli.resume
from prorl_hpc.__main__ import main

prorl_hpc.cli.launch.make_plan = fake_plan
prorl_hpc.cli.resume.make_plan = fake_plan
prorl_hpc.cli.preflight_model.check_model = lambda *_, **__: []
sys.exit(main())
