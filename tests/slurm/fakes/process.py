"""A stand-in for any process of the plan: becomes READY, then acts as ``fakes.json`` in the run directory says, or
the environment variable FAKE_ACTS.

{"worker-0": {"ready_after": 0.1, "exit_after": 0.5, "code": 3, "says": "…", "finish": true, "deaf": true,
              "grandchild": true, "never_ready": true, "dump_environment": true, "sleeper": true, "killed": true,
              "deaths": 1, "finish_after_starts": {"worker-0": 2}, "exit_when": "go", "exit_in_attempt": 3}}

``deaths``: only the first so many starts exit. ``killed``: SIGKILL in place of an exit. ``sleeper``: a child in the
process's own group. ``drain_after``: seconds that a coordinator takes
to drain. ``exit_when``: a file of the run directory. Each start leaves a line in logs/<name>.starts: the attempt and the process id.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import msgspec

from prorl_hpc.messages.status import Phase
from prorl_hpc.observe.process import Process, process_arguments
from prorl_hpc.slurm.plan import Plan


def main() -> None:
    args = process_arguments("fakes.process")
    role = args.name.rpartition("-")[0] or args.name
    process = Process.start(role, args.run_dir, args.name)
    acts = json.loads(os.environ.get("FAKE_ACTS") or (process.run.path / "fakes.json").read_text()).get(args.name, {})
    stopped = []
    signal.signal(signal.SIGTERM, (lambda *_: None) if acts.get("deaf") else (lambda *_: stopped.append(1)))
    draining: list[float] = []
    signal.signal(signal.SIGUSR1, lambda *_: draining.append(time.monotonic()))
    print(f"{args.name} rank {args.rank} of {args.world} on {process.node}", file=sys.stderr, flush=True)
    starts = process.run.logs / f"{args.name}.starts"
    with starts.open("a") as file:
        file.write(f"{os.environ['PRORL_ATTEMPT']} {os.getpid()}\n")
    if len(starts.read_text().splitlines()) > acts.get("deaths", 1_000_000):
        acts.pop("exit_after")
    if acts.get("sleeper"):
        subprocess.Popen(["sleep", "600"])
    if acts.get("dump_environment"):
        (process.run.logs / f"{args.name}.env.json").write_text(json.dumps(dict(os.environ)))
    if acts.get("grandchild"):  # leaves its group, its session and its parent, and is deaf
        deaf = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        command = f"setsid {sys.executable} -c '{deaf}' &"
        subprocess.run(["bash", "-c", command], check=True)
    (process.runtime_dir / f"{args.name}.sock").touch()
    time.sleep(acts.get("ready_after", 0.0))
    if not acts.get("never_ready"):
        process.ready({"zmq_ipc": f"ipc://{process.runtime_dir}/x", "uds": f"{process.runtime_dir}/http.sock"})
    if acts.get("finish"):  # as the real trainer, which needs all the others
        everyone = [p.name for p in msgspec.json.decode(process.run.plan_file.read_bytes(), type=Plan).processes]
        while not stopped and not all(process.run.process_state(name).exists() for name in everyone):
            time.sleep(0.05)
        for name, count in acts.get("finish_after_starts", {}).items():
            started = process.run.logs / f"{name}.starts"
            while not stopped and (not started.exists() or len(started.read_text().splitlines()) < count):
                time.sleep(0.05)
    begun = time.monotonic()
    while not stopped:
        if draining and time.monotonic() - draining[0] >= acts.get("drain_after", 0.0):
            process.run.drained_marker.touch()
        if "exit_after" in acts and time.monotonic() - begun > acts["exit_after"]:
            break
        if "exit_when" in acts and (process.run.path / acts["exit_when"]).exists():
            break
        if process.run.attempt >= acts.get("exit_in_attempt", 1_000_000):
            break
        time.sleep(0.02)
    else:
        process.say(Phase.ENDED, "was told to stop")
        (process.run.logs / f"{args.name}.stopped").write_text(str(time.time()))
        sys.exit(0)
    if acts.get("finish"):
        process.run.finished_marker.touch()
        process.ended()
    print(acts.get("says", ""), file=sys.stderr, flush=True)
    if acts.get("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(acts.get("code", 0))


if __name__ == "__main__":
    main()
