"""``jupyter_tcp.py SITE CALLS CODE``, inside a sandbox: the same kind of kernel by way of jupyter_client over TCP.

A blocking client in the process that started the kernel: send a cell, wait for its reply and for the kernel to be
idle, as ``execute_interactive`` does. Prints a JSON list of seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

site, calls, code = sys.argv[1:]
sys.path.append(site)

from jupyter_client.blocking.client import BlockingKernelClient  # noqa: E402
from jupyter_client.connect import write_connection_file  # noqa: E402

_WARM_UP = 3
_READY_S = 60.0
_KERNEL = "import sys; sys.path.append(sys.argv.pop(1)); from ipykernel.kernelapp import launch_new_instance as start; start()"


def start_kernel(connection: str) -> subprocess.Popen[bytes]:
    ours = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
    python = ours[: ours.index("-I")]  # however this process was started
    log = Path(connection).with_suffix(".log").open("wb")
    return subprocess.Popen([*python, "-I", "-S", "-c", _KERNEL, site, "-f", connection], stdout=log, stderr=log)


def connect(connection: str, kernel: subprocess.Popen[bytes]) -> BlockingKernelClient:
    client = BlockingKernelClient(connection_file=connection)
    client.load_connection_file()
    client.start_channels()
    give_up = time.monotonic() + _READY_S
    while kernel.poll() is None and time.monotonic() < give_up:
        try:
            client.wait_for_ready(timeout=5)
            return client
        except RuntimeError:
            time.sleep(0.1)  # it takes a kernel without heartbeat yet for a dead one
    sys.exit(f"no kernel: {Path(connection).with_suffix('.log').read_text()[-500:]}")


def round_trip(client: BlockingKernelClient) -> float:
    shown: list[str] = []
    began = time.perf_counter()
    reply = client.execute_interactive(code, timeout=20, output_hook=lambda message: shown.append(message["msg_type"]))
    seconds = time.perf_counter() - began
    if reply["content"]["status"] != "ok" or "execute_result" not in shown:
        sys.exit(f"the kernel answered {reply['content']} and showed {shown}")
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["IPYTHONDIR"] = os.environ["JUPYTER_RUNTIME_DIR"] = directory
        connection, _ = write_connection_file(f"{directory}/kernel.json", transport="tcp", ip="127.0.0.1")
        kernel = start_kernel(connection)
        try:
            client = connect(connection, kernel)
            seconds = [round_trip(client) for _ in range(_WARM_UP + int(calls))]
            client.stop_channels()
        finally:
            kernel.kill()
            kernel.wait()
    print(json.dumps(seconds[_WARM_UP:]))


main()
