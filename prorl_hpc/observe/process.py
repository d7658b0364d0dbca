"""What every process of a run does first and last: logging, its state file, signals.

    process = Process.start("worker", args.run_dir, args.name)
    process.ready({"zmq": …}) … process.ended()

Exit codes: 0 on a requested stop or when the work is done, anything else is a failure that ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from prorl_hpc import __version__
from prorl_hpc.config.run_directory import RunDirectory, node_name
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.codec import read_json, write_json
from prorl_hpc.messages.errors import ProrlError, RunError
from prorl_hpc.messages.status import Phase, ProcessState

T = TypeVar("T")
_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter when the event loop has something to do; Python's own is 5 ms."""
START_TOKEN, LEASH, VERSION = "PRORL_START_TOKEN", "PRORL_LEASH", "PRORL_VERSION"
"""In the environment of a process of the plan: its start's own token; ``stdin`` if it is to end, with its group, when
standard input does; the supervisor's version of this package, which one in a container must have too."""
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def process_arguments(role: str) -> argparse.Namespace:
    """``--run-dir PATH --name NAME [--rank N --world N --index N]``, as the supervisor passes them."""
    parser = argparse.ArgumentParser(prog=f"python -m prorl_hpc.{role}")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    return parser.parse_args()


@dataclass
class Process:
    """This process as the run knows it."""

    name: str
    role: str
    run: RunDirectory
    config: ProrlConfig
    runtime_dir: Path
    node: str = field(default_factory=node_name)
    _endpoints: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, role: str, run_dir: Path, name: str) -> Process:
        """Set up logging to stderr (the supervisor keeps it in logs/<name>.log) and say STARTING."""
        logging.basicConfig(level=os.environ.get("PRORL_LOG_LEVEL", "INFO"), format=LOG_FORMAT, stream=sys.stderr)
        _end_with_supervisor()
        _check_version()
        run = RunDirectory.open(run_dir)
        config = run.load_config()
        process = cls(name, role, run, config, run.make_runtime_dir(config.run.runtime_root))
        process.say(Phase.STARTING)
        return process

    def say(self, phase: Phase, detail: str = "", endpoints: dict[str, str] | None = None) -> None:
        """Publish this process's state to state/<name>.json."""
        if endpoints is not None:
            self._endpoints = endpoints
        state = ProcessState(
            self.name,
            self.role,
            self.node,
            os.getpid(),
            phase,
            detail,
            self._endpoints,
            time.time(),
            os.environ.get(START_TOKEN, ""),
        )
        write_json(self.run.process_state(self.name), state)

    def ready(self, endpoints: dict[str, str] | None = None, detail: str = "") -> None:
        self.say(Phase.READY, detail, endpoints)

    def ended(self) -> None:
        self.say(Phase.ENDED)

    async def wait_for(self, name: str, timeout_s: float) -> ProcessState:
        """Wait until process ``name`` is READY; TimeoutError says what it was doing."""
        deadline = time.monotonic() + timeout_s
        state: ProcessState | None = None
        while time.monotonic() < deadline:
            state = read_json(self.run.process_state(name), ProcessState)
            if state is not None and state.phase is Phase.READY:
                return state
            await asyncio.sleep(0.1)
        doing = "did not start" if state is None else f"is {state.phase} ({state.detail or 'no detail'})"
        raise TimeoutError(
            f"{self.name} waited {timeout_s:.0f} s for {name}, which {doing}: see {self.run.process_log(name)}"
        )


def _end_with_supervisor() -> None:
    """Under a container program PR_SET_PDEATHSIG does not reach us: the supervisor holds the other end of our standard
    input, and when that closes, however it died, our process group is killed. All but its leader, the container program:
    it ends with us, and takes the image's FUSE process along."""
    if os.environ.pop(LEASH, "") != "stdin":
        return
    import psutil  # not wanted by those who only look at a run

    leash = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)  # what we start must not read from it

    def wait() -> None:
        while os.read(leash, 1024):
            pass
        group = os.getpgrp()
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid not in (group, os.getpid()) and os.getpgid(pid) == group:
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-supervisor", daemon=True).start()


def _check_version() -> None:
    wanted = os.environ.get(VERSION, __version__)
    if wanted != __version__:
        raise RunError(
            f"the container's prorl_hpc is {__version__}, the run's is {wanted}: build cluster.container.image anew with "
            "the same version"
        )


def stop_event() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def favour_the_loop() -> None:
    """Keep the event loop's pauses short, once all is loaded. Threads beside it give the interpreter back soon; what is
    here now stays, and what is made later seldom has cycles: a full collection would hold everything up."""
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """What ``work`` returns; None if ``stop`` came first, then ``work`` is cancelled."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def run_to_end(process: Process, work: Coroutine[Any, Any, None]) -> int:
    """Run ``work``; the exit code is 0 after a requested stop, 1 after anything else, with the reason in the log."""
    try:
        asyncio.run(work)
    except Exception as error:
        expected = isinstance(error, ProrlError | TimeoutError)
        logging.getLogger(f"prorl_hpc.{process.role}").error("%s", error, exc_info=None if expected else error)
        process.say(Phase.FAILED, str(error))
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to be told to end is no news any more, and asyncio listens no more
    process.ended()
    return 0


def exit_at_once(code: int) -> NoReturn:
    """Leave without the interpreter's teardown, which for torch and gigabytes of tensors takes longer than a stop may."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
