"""The program that runs an agent's cells: ``python3 cell_runner.py MODE SITE ROOT CONTROL [CONNECTION_FILE]``.

MODE is ``inprocess`` (an InteractiveShell that reads cells from CONTROL) or ``kernel`` (a Jupyter kernel). SITE is where
IPython is found when this Python is ours, ROOT the workspace, CONTROL the number of a socket to the tool server, with a
JSON object a line: ``{"ready": version}``, ``{"file": path}`` for each image saved, and in-process ``{"code": …}`` in and
``{"done": exit code}`` out. All text, of Python, of C code and of child processes alike, is written to fd 1 and 2, so it
arrives in order. It may be the image's Python that runs this: 3.7 and IPython 7 are enough.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import re
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType
    from typing import Any, NoReturn

FILES = ".ipython_files"
"""Where images are saved, in the workspace."""
IMAGES = (("image/png", "png"), ("image/jpeg", "jpg"), ("image/svg+xml", "svg"))
TEXTS = ("text/plain", "text/markdown")
PLAIN = re.compile(r"(?:\d[\d.]* ?[-+*/]|[A-Za-z_][\w.]*(?:[-+*(\[]| ?=(?!=))|[\"'(\[{])[^%!?\n]*")
"""A line that is surely Python: IPython has nothing to translate in it. Looking for that is a quarter of its time."""
NO_INPUT = "nobody answers input() here: put the values into the code, or read them from a file"
LEFT = "[exit ends the cell only: variables are kept; ipython_restart makes a new interpreter]"


class Control:
    """The socket to the tool server."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._lines = os.fdopen(fd, "rb")

    def send(self, **message: object) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]

    def receive(self) -> dict[str, Any] | None:
        """None when the tool server is gone."""
        line = self._lines.readline()
        return json.loads(line) if line else None


class Display:
    """What cells show: text goes to stdout, images become files that stdout names."""

    def __init__(self, root: str, control: Control) -> None:
        self._root = root
        self._control = control
        self._number = 0

    def publish(self, data: dict[str, Any], metadata: object = None, **_: object) -> None:
        for kind, ending in IMAGES:
            if kind in data:
                path = self._save(data[kind], ending)
                self._control.send(file=path)
                print(f"[image: {path}]")
                return
        texts = [data[kind] for kind in TEXTS if kind in data]
        if texts:
            # <IPython.core.display.Markdown object>: the text itself is the other one.
            print(texts[-1] if texts[0].startswith("<IPython.core.display") else texts[0])

    def _save(self, content: bytes | str, ending: str) -> str:
        if isinstance(content, str) and ending != "svg":
            import binascii

            content = binascii.a2b_base64(content)
        elif isinstance(content, str):
            content = content.encode()
        os.makedirs(os.path.join(self._root, FILES), exist_ok=True)
        while True:
            self._number += 1
            path = f"{FILES}/image_{self._number}.{ending}"
            try:
                with open(os.path.join(self._root, path), "xb") as file:
                    file.write(content)
            except FileExistsError:
                continue
            return path


def no_input(*_: object, **__: object) -> NoReturn:
    raise EOFError(NO_INPUT)


def c_flusher() -> Callable[[], object]:
    """What writes out the buffer of C's own stdout, of which Python knows nothing."""
    try:
        import ctypes

        flush = ctypes.CDLL(None).fflush
    except (ImportError, OSError, AttributeError):
        return lambda: None  # this Python was built without; C's stdout is then written when its buffer is full
    return lambda: flush(None)


def attach(shell: Any, display: Display) -> None:
    """Let the shell, ours or a kernel's, write all it has to say to stdout, as plain text."""
    own = os.getpid()
    flush_c = c_flusher()

    def end_cell(*_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        flush_c()
        if os.getpid() != own:  # the cell forked, and this is the child, at its end
            os._exit(0)

    def show_page(_: object, text: Any, *__: object, **___: object) -> None:
        print(text.get("text/plain", "") if isinstance(text, dict) else text)

    transform = shell.transform_cell
    shell.transform_cell = lambda cell: cell + "\n" if PLAIN.fullmatch(cell) else transform(cell)
    shell.events.register("post_run_cell", end_cell)
    shell.set_hook("show_in_pager", show_page, 0)
    shell.system = shell.system_raw
    shell.display_formatter.active_types = [kind for kind, _ in IMAGES] + list(TEXTS)
    shell.display_pub.publish = display.publish
    shell.display_pub.clear_output = lambda wait=False: None
    attach_results(shell, display)
    attach_errors(shell)


def attach_errors(shell: Any) -> None:
    """Tracebacks go to stdout like all else; exit does not end the interpreter."""

    def leave(_: object, code: object = None) -> NoReturn:
        raise SystemExit(code)

    def show_traceback(kind: object, error: object, lines: list[str]) -> None:
        shell._last_traceback = lines
        print(shell.InteractiveTB.stb2text(lines))

    plain_showtraceback = shell.showtraceback

    def showtraceback(*arguments: object, **named: object) -> None:
        if isinstance(sys.exc_info()[1], SystemExit):
            shell._last_traceback = []
            print(LEFT)
        else:
            plain_showtraceback(*arguments, **named)

    type(shell.exiter).__call__ = leave
    shell._showtraceback = show_traceback
    shell.showtraceback = showtraceback


def attach_results(shell: Any, display: Display) -> None:
    """The value of a cell is shown as all else is. What it costs to show a number counts: most cells are small."""
    hook = shell.displayhook
    plain_quiet, plain_format = hook.quiet, hook.compute_format_data

    def quiet() -> bool:
        history = shell.history_manager.input_hist_parsed
        return ";" in history[-1] and plain_quiet()

    def compute_format_data(result: object) -> tuple[dict[str, Any], dict[str, Any]]:
        if type(result) in (int, float, bool):
            return {"text/plain": repr(result)}, {}
        formatted: tuple[dict[str, Any], dict[str, Any]] = plain_format(result)
        return formatted

    hook.quiet = quiet
    hook.compute_format_data = compute_format_data
    hook.start_displayhook = hook.write_output_prompt = hook.finish_displayhook = lambda: None
    hook.write_format_data = lambda data, metadata=None: display.publish(data)
    hook.log_output = lambda data: None  # it would keep every image in memory


class Cells:
    """Cells from the control socket, one after the other, in one InteractiveShell."""

    def __init__(self, control: Control, shell: Any) -> None:
        self._control = control
        self._shell = shell
        self._loop: Any = None
        shell.loop_runner = self._run_async

    def serve(self) -> None:
        signal.signal(signal.SIGINT, _not_now)
        while True:
            message = self._control.receive()
            if message is None:
                return
            try:
                code = self._run(message["code"])
            except KeyboardInterrupt:
                code = 1
            signal.signal(signal.SIGINT, _not_now)
            self._control.send(done=code)

    def _run(self, code: str) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        result = self._shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        return 1 if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)) else 0

    def _run_async(self, cell: Coroutine[Any, Any, object]) -> object:
        """As IPython's own, but an interrupted cell does not go on in the next one."""
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(cell)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
        return self._loop.run_until_complete(task)  # the shell shows where the cell was


def _not_now(number: int, frame: FrameType | None) -> None:
    """An interrupt that came too late for its cell."""


def settings() -> Any:
    from IPython import version_info
    from traitlets.config import Config

    config = Config()
    config.InteractiveShell.colors = "nocolor" if version_info[0] >= 9 else "NoColor"
    config.InteractiveShell.separate_in = ""
    config.HistoryManager.enabled = False
    config.Kernel._execute_sleep = 0.0
    return config


def find_modules_of_cells() -> None:
    """From here on as an interactive Python does it; before, no file of the workspace could hide a module of ours."""
    given = os.environ.get("PYTHONPATH", "") if sys.flags.isolated else ""
    sys.path[:0] = ["", *filter(None, given.split(os.pathsep))]


def start_inprocess(display: Display, control: Control) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    builtins.input = no_input
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    shell = InteractiveShell.instance(config=settings())
    attach(shell, display)
    find_modules_of_cells()
    shell.builtin_trap.__enter__()  # for good: setting and removing it is work for every cell
    shell.display_trap.__enter__()
    cells = Cells(control, shell)
    gc.collect()
    gc.freeze()  # what IPython is made of stays
    control.send(ready=sys.version.split()[0])
    cells.serve()


def start_kernel(display: Display, control: Control, connection_file: str) -> None:
    from ipykernel.kernelapp import IPKernelApp

    class CellKernelApp(IPKernelApp):
        outstream_class: Any = None  # stdout stays the tool server's pipe

    app: Any = CellKernelApp.instance(config=settings())
    app.initialize(["-f", connection_file])
    attach(app.shell, display)
    app.kernel.raw_input = app.kernel.getpass = no_input
    find_modules_of_cells()
    control.send(ready=sys.version.split()[0])
    wake_at_signals()
    app.start()


def wake_at_signals() -> None:
    """Without it, an interrupt of ``await`` is noticed by the kernel's loop when something else happens."""
    from tornado.ioloop import IOLoop

    loop: Any = IOLoop.current()
    loop.asyncio_loop.add_signal_handler(signal.SIGWINCH, lambda: None)  # from now on, any signal wakes it


def main() -> None:
    sys.path[:] = [path for path in sys.path if path and path != os.path.dirname(os.path.abspath(__file__))]
    mode, site, root, fd, *rest = sys.argv[1:]
    if site:
        sys.path.append(site)
    sys.argv[:] = [""]
    import faulthandler
    import warnings

    warnings.filterwarnings("ignore", message="To exit: use")  # LEFT says it
    faulthandler.enable(all_threads=False)  # a segmentation fault says where it was
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    control = Control(int(fd))
    display = Display(root, control)
    if mode == "kernel":
        start_kernel(display, control, *rest)
    else:
        start_inprocess(display, control)


if __name__ == "__main__":
    main()
    os._exit(0)
