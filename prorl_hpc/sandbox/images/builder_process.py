"""Runs one build, pull or inspection of spython, in a process of its own: ``python -m … '{"what": "build", …}'``.

spython (0.3.14) composes the commands. How it runs them is replaced, because of its faults: it calls ``singularity``
even where only apptainer is, reads standard error only after the end (a build that writes 64 KiB there stops for
ever, and nobody sees its progress), stumbles over invalid UTF-8, and reports a failure only to its log. Here the
command writes straight to this process's output, and its exit code is ours.

Ends when standard input does: whoever started this is gone, and nobody waits for the image.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any


def main() -> int:
    request = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: None)  # the builder obeys it; this process stays to tidy up
    threading.Thread(target=_end_with_parent, daemon=True).start()
    place = next(
        (os.environ[n] for n in ("APPTAINER_TMPDIR", "SINGULARITY_TMPDIR", "TMPDIR") if os.environ.get(n)), "/tmp"
    )
    temporary = tempfile.mkdtemp(prefix="prorl-image-", dir=place)
    os.environ["APPTAINER_TMPDIR"] = os.environ["SINGULARITY_TMPDIR"] = temporary
    try:
        _call_spython(**request)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return 0


def _call_spython(
    *, what: str, binary: str, source: str, target: str = "", options: tuple[str, ...] = (), sandbox: bool = False
) -> None:
    from spython.main import Client

    for module in ("build", "pull"):
        _module(module).stream_command = lambda cmd, **_: _run([binary, *cmd[1:]])
    if what == "build":
        _, lines = Client.build(
            source, target, sandbox=sandbox, sudo=False, stream=True, quiet=True, force=True, options=list(options)
        )
    elif what == "pull":
        _, lines = Client.pull(source, target, stream=True, quiet=True, force=True)
    else:
        _module("inspect").run_command = lambda cmd, **_: _capture([binary, *cmd[1:]])
        print(json.dumps(Client.inspect(source)))
        return
    for _ in lines:
        pass


def _module(name: str) -> Any:
    return importlib.import_module(f"spython.main.{name}")


def _run(command: list[str]) -> Iterator[str]:
    code = subprocess.call(command, stdin=subprocess.DEVNULL)
    if code:
        sys.exit(code if code > 0 else 128 - code)
    return iter(())


def _capture(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return {"return_code": 0, "message": [done.stdout.decode(errors="replace")]}


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(20)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
