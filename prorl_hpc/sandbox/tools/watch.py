"""The watch over what a sandbox uses, for limits that neither a control group nor an rlimit holds on this node.

It looks often while calls are under way, and now and then otherwise. What exceeds a limit is killed, and the calls
that run are told so in words (Host.notices). Where that does not help, the server ends, and, as the first process of
the sandbox's PID namespace, everything in the sandbox with it.
"""

from __future__ import annotations

import os
import resource
import signal
import time

from prorl_hpc.sandbox.tools import usage
from prorl_hpc.sandbox.tools.loop import Ended
from prorl_hpc.sandbox.tools.processes import processes_are_counted_here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from prorl_hpc.sandbox.tools.toolset import Host
    from prorl_hpc.sandbox.tools.usage import Process

BUSY_S, IDLE_S = 0.1, 1.0
"""Between two looks: while calls are under way, and otherwise."""
COST = 20
"""A look is followed by a pause of so many times what it took."""
STUCK_S = 1.0
"""So long at the limit of processes is a fork bomb that the kernel holds."""
WIN_S = 2.0
"""So long a fight against new processes may take."""
_MIB = 1 << 20


class Watch:
    """One per tool server; ``work`` is for its loop."""

    def __init__(self, host: Host, busy: Callable[[], bool]) -> None:
        limits = host.settings.limits
        self._host = host
        self._busy = busy
        self._max_processes = limits.get("max_processes", 0)
        self._max_memory = limits.get("max_memory_mib", 0) * _MIB
        self._max_disk = limits.get("max_disk_mib", 0) * _MIB
        self._mounts = usage.memory_mounts() if usage.contained(host) else []
        self._disk_allowed = self._max_disk
        self._files_allowed = self._max_memory
        self._unnamed_memory = 0
        self._full_since = 0.0
        self._killed = 0

    def work(self) -> Generator[float, None, None]:
        """Without end; Ended when the sandbox cannot be held."""
        next_walk = 0.0
        while True:
            began = time.monotonic()
            seen = usage.processes(self._host)
            self._look_at_processes(seen)
            self._look_at_memory(seen)
            looked = time.monotonic()
            pause = COST * (looked - began)
            if looked >= next_walk and (self._max_disk or self._max_memory):
                spent = yield from self._look_at_files(seen)
                next_walk = time.monotonic() + max(2 * BUSY_S, COST * spent)
            # Whatever happens wakes this up: a call that begins shortens the pause.
            while time.monotonic() < (until := looked + max(BUSY_S if self._hurry(seen) else IDLE_S, pause)):
                yield until

    def _hurry(self, seen: list[Process]) -> bool:
        return self._busy() or 4 * len(seen) > self._max_processes > 0

    def _tell(self, cause: str, text: str) -> None:
        self._host.notices.add(cause, text)

    # processes

    def _look_at_processes(self, seen: list[Process]) -> None:
        count = 1 + sum(process.threads for process in seen)
        if not self._max_processes or count < self._max_processes // 2:
            self._full_since = 0.0
            return
        now = time.monotonic()
        if count <= self._max_processes:
            # The kernel may count some more, such as the container's launcher, so it is asked.
            self._full_since = (self._full_since or now) if self._kernel_refuses_more() else 0.0
            if not self._full_since or now - self._full_since < STUCK_S:
                return
        self._full_since = 0.0
        most = self._max_processes
        self._tell("processes", f"the sandbox ran all {most} processes that are allowed, and more: all were killed")
        self._kill_all(f"the sandbox ran more than the {self._max_processes} processes that are allowed")

    def _kernel_refuses_more(self) -> bool:
        """Whether one more process would be over its limit now."""
        unlimited = resource.getrlimit(resource.RLIMIT_NPROC)
        if processes_are_counted_here():
            resource.setrlimit(resource.RLIMIT_NPROC, (min(self._max_processes, unlimited[1]), unlimited[1]))
        try:
            if os.fork() == 0:
                os._exit(0)
        except BlockingIOError:
            return True
        finally:
            resource.setrlimit(resource.RLIMIT_NPROC, unlimited)
        return False

    def _kill_all(self, reason: str) -> None:
        """Kill everything but this process, against what goes on making more. Ended when it goes on too long."""
        give_up = time.monotonic() + WIN_S
        while left := [process for process in usage.processes(self._host) if process.state != "Z"]:
            if time.monotonic() > give_up:
                raise Ended(f"{reason}, and went on making them")
            if os.getpid() == 1:
                os.kill(-1, signal.SIGKILL)  # all in this PID namespace at once: none can fork in between
            else:
                _kill(left)
            time.sleep(0.002)

    # memory

    def _look_at_memory(self, seen: list[Process]) -> None:
        most = self._max_memory
        if not most:
            return
        files = self._unnamed_memory
        if usage.contained(self._host):
            files += usage.files_in_memory_bytes(self._mounts)
        self._files_allowed = max(most, min(self._files_allowed, files + _MIB))
        if files + sum(map(usage.private_bytes, seen)) <= most:
            return
        fair = {process: usage.fair_bytes(process) for process in seen if process.state != "Z"}
        processes = sum(fair.values())
        said = f"the sandbox used {(files + processes) // _MIB} MiB of memory, {most // _MIB} are allowed"
        if files > 2 * most:
            raise Ended(f"{said}, and it was files that took them")
        if files > self._files_allowed:
            self._files_allowed = files + _MIB  # so that later commands can delete files
            self._kill_running("files in memory", seen, f"{said}, files in memory (/dev/shm) included")
        elif fair and (processes > most // 2 if files > most else files + processes > most):
            biggest = max(fair, key=lambda process: fair[process])
            if biggest.pid != self._killed:
                self._tell(f"memory {biggest.name}", f"{said}: process {biggest.name} was killed")
            self._killed = biggest.pid
            _kill([biggest])

    # disk

    def _look_at_files(self, seen: list[Process]) -> Generator[float, None, float]:
        """The seconds that it took."""
        began = time.monotonic()
        used = yield from usage.walk_disk(usage.disk_places(self._host))
        self._unnamed_memory, unnamed = usage.unnamed_bytes(seen, self._mounts)
        used += unnamed + os.fstat(2).st_blocks * 512  # our log is a file of the node's, too
        if self._max_disk:
            self._look_at_disk(used)
        return time.monotonic() - began

    def _look_at_disk(self, used: int) -> None:
        most = self._max_disk
        if used <= self._disk_allowed:
            self._disk_allowed = max(most, min(self._disk_allowed, used + _MIB))
            return
        said = f"the sandbox used {used // _MIB} MiB of disk, {most // _MIB} are allowed"
        if used > 2 * most + 64 * _MIB and self._disk_allowed > most:
            raise Ended(f"{said}, and it went on writing")
        self._disk_allowed = used + _MIB  # so that later commands can delete files
        self._kill_running("disk", usage.processes(self._host), said)

    def _kill_running(self, cause: str, seen: list[Process], said: str) -> None:
        """What commands and cells have started; the shells, which sit at terminals that this process gave them, only
        where nothing else is there that could be it, and then idle interpreters."""
        own = os.getpid()
        alive = [process for process in seen if process.state != "Z"]
        busy = [process for process in alive if process.pid not in self._host.idle]
        running = [process for process in busy if not (process.parent == own and process.terminal)]
        if alive:
            self._tell(cause, f"{said}: what ran was killed; delete files before more is written")
            _kill(running or busy or alive)


def _kill(processes: list[Process]) -> None:
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # gone, or a setuid program's, which no sandbox has
