"""The tool server: the one program of ours that runs inside a sandbox, and serves all its tools.

It listens on its socket, writes ``ready`` to stdout, takes exactly one connection and removes the socket, so that
nothing inside can connect to it or put another in its place. EOF on stdin or on the connection ends it and all it
started, and so do SIGTERM and SIGINT where it is not PID 1: that is how a sandbox dies with its worker, however the
worker dies. Frames: see framing.py.
"""

from __future__ import annotations

import _socket  # the module socket imports selectors and makes enumerations, for which every start would wait
import os
import sys
import time

from prorl_hpc.sandbox.tools.connection import Connection
from prorl_hpc.sandbox.tools.framing import VERSION
from prorl_hpc.sandbox.tools.loop import Ended, Loop
from prorl_hpc.sandbox.tools.notices import Notices
from prorl_hpc.sandbox.tools.processes import be_the_first_to_go, become_subreaper, end_everything
from prorl_hpc.sandbox.tools.reaper import Reaper
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused, Settings, ToolBox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILE_TOO_LARGE = 128 + 25
"""The exit code of what SIGXFSZ ended."""


class Server:
    def __init__(self, kit: str) -> None:
        self._kit = kit
        self._loop = Loop()
        self._reaper = Reaper(self._loop, self._on_signal)
        self._loop.watch(0, self._on_stdin)
        self._connection: Connection | None = None
        self._tools: ToolBox | None = None
        self._calls: dict[int, Call] = {}
        self._notices = Notices()
        self._limits: dict[str, int] = {}
        self._told = 0

    def serve(self, path: str) -> None:
        """Until the worker goes."""
        listener = _socket.socket(_socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)

        def accept() -> None:
            peer = _socket.socket(fileno=listener._accept()[0])  # type: ignore[attr-defined]
            self._loop.unwatch(listener.fileno())
            listener.close()
            os.unlink(path)
            self._connection = Connection(self._loop, peer, self._on_frame)

        self._loop.watch(listener.fileno(), accept)
        os.write(1, b"ready\n")
        try:
            self._loop.run()
        except Ended as end:
            if self._connection is not None and str(end):
                self._connection.send_last({"ended": str(end)})
        except Exception as error:
            if self._connection is not None:
                self._connection.send_last({"ended": f"its tool server failed: {error!r}"})
            raise

    def _on_signal(self, number: int) -> None:
        raise Ended(f"it got signal {number}")

    def _on_stdin(self) -> None:
        if not os.read(0, 65536):
            raise Ended("")

    def _on_frame(self, header: dict[str, Any], body: bytes) -> None:
        if self._tools is None:
            self._begin(header)
        elif "cancel" in header:
            if call := self._calls.get(header["cancel"]):
                call.cancelled = True
        else:
            self._call(header, body)

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        assert self._connection is not None
        self._connection.send(header, body)

    def _begin(self, header: dict[str, Any]) -> None:
        if header.get("hello") != VERSION:
            raise Ended(f"the worker speaks version {header.get('hello')!r} of the protocol, the tool server {VERSION}")
        host = Host(Settings(header["settings"]), self._loop, self._reaper, self._kit, self._notices)
        self._tools = ToolBox(host)
        self._limits = host.settings.limits
        self._send({"hello": VERSION})
        self._loop.later(lambda: self._start_shell(host))

    def _start_shell(self, host: Host) -> None:
        """The first one, before anybody asks: it takes as long to start as the rest of us."""
        assert self._tools is not None

        def started(answer: Answer | None, error: BaseException | None) -> None:
            if isinstance(error, BlockingIOError):
                most = self._limits.get("max_processes", 0)
                raise Ended(f"no shell can be started: {error.strerror}; max_processes={most}: is that too few?")
            if error is not None or answer is None or answer.exit_code != 0:
                raise Ended(f"its shell does not work: {error or (answer and answer.output)!r}")
            self._start_watch(host)

        first = Call(0, "bash", 20.0, b"")
        self._loop.start(self._tools.get("shells").bash(first, command="true"), started)

    def _start_watch(self, host: Host) -> None:
        from prorl_hpc.sandbox.tools.watch import Watch

        def failed(_: Any, error: BaseException | None) -> None:
            raise Ended(f"its watch over memory, processes and disk failed: {error!r}")

        self._loop.start(Watch(host, lambda: bool(self._calls)).work(), failed)

    def _notices_since(self, first: int) -> str:
        """What the watch did while a call ran, or before it when no call was there to be told."""
        self._told = len(self._notices)
        return self._notices.since(first)

    def _of_the_file_limit(self, exit_code: int | None) -> str:
        """The kernel ends what writes more to a file than it may, and nobody says why."""
        most = self._limits.get("max_file_mib", 0)
        if not most or exit_code != FILE_TOO_LARGE:
            return ""
        return f"[exit code {exit_code} is that of SIGXFSZ: a file reached the limit of {most} MiB]\n"

    def _call(self, header: dict[str, Any], body: bytes) -> None:
        assert self._tools is not None
        began = time.monotonic()
        call = Call(header["id"], header["tool"], float(header["timeout_s"]), body)
        self._calls[call.number] = call
        self._loop.stay_awake()
        first_notice = self._told

        def answer(result: Any, error: BaseException | None) -> None:
            del self._calls[call.number]
            self._loop.stay_awake()
            takes_notices = error is not None or isinstance(result.output, str)  # else the next one does
            news = takes_notices and len(self._notices) > first_notice
            notices = self._notices_since(first_notice) if news else ""
            if isinstance(error, Refused):
                result = Answer(f"{error}\n", 2)
            elif error is not None:
                what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._send({"id": call.number, "error": f"{call.tool} failed in the sandbox: {what} {notices}".strip()})
                return
            output = result.output
            notices += self._of_the_file_limit(result.exit_code)
            if notices and isinstance(output, str):
                output = f"{output}\n{notices}" if output and not output.endswith("\n") else output + notices
            encoded = output if isinstance(output, bytes) else output.encode("utf-8", "replace")
            self._send({"id": call.number, "seconds": time.monotonic() - began, **result.header()}, encoded)

        try:
            begun = self._tools.find(call.tool, header["arguments"])(call, **header["arguments"])
        except Exception as error:
            answer(None, error)
            return
        if isinstance(begun, Answer):
            answer(begun, None)
        else:
            self._loop.start(begun, answer)


def main(kit: str, path: str) -> None:
    os.closerange(3, 1024)  # what the container's start left open is not for the agent
    os.umask(0o022)
    become_subreaper()
    be_the_first_to_go()
    try:
        if kit:  # in a container; else there is nothing to hold anybody in
            from prorl_hpc.sandbox.tools.confinement import confine

            confine()
        Server(kit).serve(path)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.exit(1)
    finally:
        end_everything()
