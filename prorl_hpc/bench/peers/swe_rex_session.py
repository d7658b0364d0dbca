"""``swe_rex_session.py SITE CALLS COMMAND``, inside a sandbox: a bash session of SWE-ReX's local runtime.

Called in the process that holds it, without its HTTP server; exit code included. Prints a JSON list of seconds.
"""

# mypy: ignore-errors
# (SWE-ReX is not in the environment that is checked.)

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time

site, calls, command = sys.argv[1:]
sys.path.insert(0, site)

from swerex.runtime.abstract import BashAction, CreateBashSessionRequest  # noqa: E402
from swerex.runtime.local import LocalRuntime  # noqa: E402

_WARM_UP = 2


async def main() -> None:
    runtime = LocalRuntime(logger=logging.getLogger("quiet"))
    await runtime.create_session(CreateBashSessionRequest())
    seconds = []
    for _ in range(_WARM_UP + int(calls)):
        began = time.perf_counter()
        answer = await runtime.run_in_session(BashAction(command=command))
        seconds.append(time.perf_counter() - began)
        assert answer.exit_code == 0, answer
    await runtime.close()
    print(json.dumps(seconds[_WARM_UP:]))


asyncio.run(main())
