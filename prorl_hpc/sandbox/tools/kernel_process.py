"""A Jupyter kernel as the process that runs the cells, over Unix sockets.

Cells go out as ``execute_request`` on the kernel's shell channel, and its reply says that the cell is over. That is all
that is exchanged: what the cell writes and shows comes through the kernel's stdout, in order, also from C code and
child processes, and before the reply. So there is no second channel to wait for, which is where the usual clients
spend their time.
"""

from __future__ import annotations

import binascii
import itertools
import json
import os
import threading

from prorl_hpc.sandbox.tools.cell_process import CellProcess, Python
from prorl_hpc.sandbox.tools.loop import Loop
from prorl_hpc.sandbox.tools.toolset import Host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_numbers = itertools.count(1)


class Jupyter:
    """jupyter_client and zmq, imported by a thread while the kernel starts: it takes 0.3 s, and the loop goes on."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: list[Callable[[], None]] = []
        self.error: ImportError | None = None
        self.session_class: Any = None
        self.zmq: Any = None
        self.context: Any = None
        wake, self._done = os.pipe()
        loop.watch(wake, lambda: self._loaded(wake))
        threading.Thread(target=self._load, daemon=True).start()

    def when_loaded(self, use: Callable[[], None]) -> None:
        if self.context is not None or self.error is not None:
            use()
        else:
            self._waiting.append(use)

    def _load(self) -> None:
        try:
            import zmq
            from jupyter_client.session import Session

            self.zmq, self.session_class = zmq, Session
        except ImportError as error:
            self.error = error
        finally:
            os.close(self._done)

    def _loaded(self, wake: int) -> None:
        self._loop.close(wake)
        if self.error is None:
            self.context = self.zmq.Context()
        for use in self._waiting:
            use()
        self._waiting.clear()


class KernelProcess(CellProcess):
    """One kernel and its shell channel."""

    mode = "kernel"
    _shared: ClassVar[list[Jupyter]] = []

    def __init__(self, host: Host, candidates: list[Python]) -> None:
        super().__init__(host, candidates)
        if not self._shared:
            self._shared.append(Jupyter(host.loop))
        self._jupyter = self._shared[0]
        self._session: Any = None
        self._socket: Any = None
        self._connection: dict[str, Any] = {}

    def start(self) -> None:
        path = f"{self._host.settings.scratch}/k{next(_numbers)}"
        ports = {f"{channel}_port": number for number, channel in enumerate(CHANNELS, 1)}
        key = binascii.hexlify(os.urandom(32)).decode()
        self._connection = {"transport": "ipc", "ip": path, "signature_scheme": "hmac-sha256", "key": key, **ports}
        file = os.open(f"{path}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as connection:
            json.dump(self._connection, connection)
        self._arguments = [f"{path}.json"]
        super().start()

    def _on_ready(self) -> None:
        self._jupyter.when_loaded(self._connect)

    def _connect(self) -> None:
        if not self.pid or self._socket is not None:
            return  # it ended while we waited, or a cell forged that it is ready
        jupyter = self._jupyter
        if jupyter.error is not None:
            self.output.add(f"the tool server cannot speak to a kernel: {jupyter.error}".encode())
            self.kill()
            return
        self._session = jupyter.session_class(key=self._connection["key"].encode())
        self._socket = jupyter.context.socket(jupyter.zmq.DEALER)
        self._socket.linger = 0
        self._socket.identity = self._session.bsession
        self._socket.connect(f"ipc://{self._connection['ip']}-{self._connection['shell_port']}")
        self._loop.watch(self._socket.fd, self._receive)
        super()._on_ready()

    def _send_cell(self, code: str) -> None:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        self._session.send(self._socket, "execute_request", {**content, "stop_on_error": False})
        self._receive()  # the socket's fd tells of a change once, and sending may have taken notice of it

    def _receive(self) -> None:
        zmq = self._jupyter.zmq
        while self._socket is not None:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_reply(self._session.deserialize(self._session.feed_identities(parts)[1]))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                self.kill()  # a cell wrote to what is not its own
                return

    def _on_reply(self, message: dict[str, Any]) -> None:
        if message["msg_type"] != "execute_reply":
            return
        self._on_control()  # what the cell's images are called was said before
        content = message["content"]
        left_well = content.get("ename") == "SystemExit" and content.get("evalue") in ("None", "0", "")
        self._done(0 if content["status"] == "ok" or left_well else 1)

    def _close(self) -> None:
        super()._close()
        if self._socket is not None:
            self._loop.unwatch(self._socket.fd)
            self._socket.close()
            self._socket = None
        path = self._connection["ip"]
        for left in (f"{path}.json", *(f"{path}-{number}" for number in range(1, len(CHANNELS) + 1))):
            try:
                os.unlink(left)
            except FileNotFoundError:
                pass  # the kernel did not come so far, or removed it
