"""``ipython``: persistent Python interpreters, one per kernel name.

``sandbox.ipython`` says what an interpreter is: ``inprocess``, an InteractiveShell behind a pipe, or ``kernel``, a
Jupyter kernel. Both write what they have to say to a pipe, and show images as files of the workspace.
"""

from __future__ import annotations

import re
import time

from prorl_hpc.sandbox.tools.cell_process import CellProcess, Python, pythons
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, ClassVar

MAX_KERNELS = 8
INTERRUPT_S = 3.0
"""How long an interrupted cell may take to end before its interpreter is replaced."""
INTERRUPT_EVERY_S = 1.0
KERNEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def make_process(host: Host, candidates: list[Python]) -> CellProcess:
    if host.settings.ipython_mode == "inprocess":
        return CellProcess(host, candidates)
    from prorl_hpc.sandbox.tools.kernel_process import KernelProcess

    return KernelProcess(host, candidates)


class Kernel:
    """One named interpreter: its cells take turns, and it is started again when it ended."""

    def __init__(self, process: CellProcess) -> None:
        self._process = process
        self._was_ready = False
        self._busy = False
        self._interrupted = False
        self._replaced = False

    @property
    def running(self) -> bool:
        """Whether a cell runs."""
        return self._busy

    def interrupt(self) -> None:
        self._interrupted = True

    def run(self, call: Call, code: str) -> Generator[float, None, Answer]:
        deadline = time.monotonic() + call.timeout_s
        if not (yield from self._wait_for_turn(call, deadline)):
            why = "cancelled" if call.cancelled else f"timed out after {call.timeout_s:g} s"
            return Answer(f"[{why}: the cell before it still runs, and this one was not begun]\n", None, timed_out=True)
        self._busy, self._interrupted = True, False
        try:
            return (yield from self._run(call, code, deadline))
        finally:
            self._busy = False

    def restart(self, call: Call) -> Generator[float, None, Answer]:
        deadline = time.monotonic() + call.timeout_s
        old = self._process.pid
        self._replaced = self._busy  # then the running cell's own call starts the next one
        self._process.stop()
        while self._busy or self._process.pid == old != 0:
            if call.cancelled or time.monotonic() >= deadline:
                return Answer("[the kernel did not end in time]\n", None, timed_out=True)
            yield deadline
        self._busy = True
        try:
            if not self._process.pid:
                self._process.take()
                self._process.start()
            failure = yield from self._until_ready(call, deadline)
        finally:
            self._busy = False
        return failure or Answer("[the kernel was started again: its variables are lost]\n")

    def _wait_for_turn(self, call: Call, deadline: float) -> Generator[float, None, bool]:
        while self._busy:
            if call.cancelled or time.monotonic() >= deadline:
                return False
            yield deadline
        return True

    def _run(self, call: Call, code: str, deadline: float) -> Generator[float, None, Answer]:
        process = self._process
        before = self._revive()
        if not process.ready and (failure := (yield from self._until_ready(call, deadline))):
            return Answer(f"{before}{failure.output!s}", failure.exit_code, timed_out=failure.timed_out)
        process.begin(code)
        while process.exit_code is None and process.pid and not (call.cancelled or self._interrupted):
            if time.monotonic() >= deadline:
                break
            yield deadline
        note, timed_out = "", False
        if process.exit_code is None and process.pid:
            timed_out = not self._interrupted
            note = yield from self._interrupt(call)
        text, files = process.take()
        code_or_none = None if timed_out else process.exit_code
        if not process.pid:
            note += self._start_again()
            code_or_none = None if timed_out else 1
        if note and text and not text.endswith("\n"):
            text += "\n"
        return Answer(before + text + note, code_or_none, timed_out=timed_out, files=files)

    def _interrupt(self, call: Call) -> Generator[float, None, str]:
        """End the running cell; the note says what came of it."""
        process = self._process
        why = f"timed out after {call.timeout_s:g} s"
        if self._interrupted or call.cancelled:
            why = "interrupted" if self._interrupted else "cancelled"
        give_up = time.monotonic() + INTERRUPT_S
        while process.exit_code is None and process.pid and time.monotonic() < give_up:
            process.interrupt()
            until = time.monotonic() + INTERRUPT_EVERY_S
            while process.exit_code is None and process.pid and time.monotonic() < until:
                yield until
        process.kill_started()
        if process.exit_code is not None:
            return f"[{why}: the cell was interrupted, its variables are kept]\n"
        if not process.pid:
            return f"[{why}]\n"
        process.kill()
        while process.pid:
            yield time.monotonic() + 0.1
        return f"[{why}: the cell did not react to the interrupt, and the kernel was killed]\n"

    def _revive(self) -> str:
        """Have a process, new if need be; says so where another one ended."""
        if self._process.pid:
            return ""
        if not self._process.end:
            self._process.start()
            return ""
        said, _ = self._process.take()
        return said + ("\n" if said and not said.endswith("\n") else "") + self._start_again()

    def _start_again(self) -> str:
        how = "was ended by ipython_restart" if self._replaced else f"ended {self._process.end}"
        self._replaced = False
        self._process.start()
        return f"[the kernel {how} and was started again: its variables are lost]\n"

    def _until_ready(self, call: Call, deadline: float) -> Generator[float, None, Answer | None]:
        """None when it is ready; else why not. OSError when there never was a working one."""
        process = self._process
        while not process.ready and (process.pid or self._replaced):
            if not process.pid:
                self._replaced = False
                process.take()
                process.start()
            if process.overdue():
                process.kill()
            if call.cancelled or time.monotonic() >= deadline:
                why = "cancelled" if call.cancelled else f"timed out after {call.timeout_s:g} s"
                return Answer(f"[{why}: the kernel is still starting; run the cell again]\n", None, timed_out=True)
            yield min(deadline, time.monotonic() + 1.0)
        if process.ready:
            self._was_ready = True
            return None
        said = process.take()[0].strip()
        text = f"the kernel could not be started, it ended {process.end}: {said[-2000:] or 'it said nothing'}"
        if not self._was_ready:
            raise OSError(text)
        return Answer(f"[{text}]\n", 1)


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {
        "ipython": {"code": str, "kernel": "main"},
        "ipython_interrupt": {"kernel": "main"},
        "ipython_restart": {"kernel": "main"},
    }

    def __init__(self, host: Host) -> None:
        self._host = host
        self._candidates = pythons(host)
        self._kernels: dict[str, Kernel] = {}

    def ipython(self, call: Call, code: str, kernel: str = "main") -> Generator[float, None, Answer]:
        return self._get(kernel).run(call, code)

    def ipython_interrupt(self, call: Call, kernel: str = "main") -> Answer:
        found = self._known(kernel)
        if not found.running:
            return Answer(f"[no cell runs in kernel {kernel}]\n")
        found.interrupt()
        return Answer("[interrupted: the cell's own answer says what came of it]\n")

    def ipython_restart(self, call: Call, kernel: str = "main") -> Generator[float, None, Answer]:
        return self._known(kernel).restart(call)

    def _known(self, name: str) -> Kernel:
        if name not in self._kernels:
            raise Refused(f"there is no kernel {name!r}; running: {', '.join(self._kernels) or 'none'}")
        return self._kernels[name]

    def _get(self, name: str) -> Kernel:
        if name in self._kernels:
            return self._kernels[name]
        if not KERNEL_NAME.fullmatch(name):
            raise Refused(f"kernel name {name!r}: letters, digits, '.', '_' and '-', at most 64 of them")
        if len(self._kernels) >= MAX_KERNELS:
            raise Refused(f"there are {MAX_KERNELS} kernels already, the most allowed: {', '.join(self._kernels)}")
        self._kernels[name] = Kernel(make_process(self._host, self._candidates))
        return self._kernels[name]
