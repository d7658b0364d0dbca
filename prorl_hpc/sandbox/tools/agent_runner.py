"""``python3 -I -S agent_runner.py``: a program in the sandbox, and its door to a language model, of one lifetime.

Standard input has the job as JSON: ``command`` (argv), ``env`` (added to ours), ``files`` (name in the workspace →
content), ``values`` (placeholder → text) and ``socket`` (the name of the gateway's
among the sandbox's sockets). A port of loopback is listened on, every
connection to it is a connection to the socket, and {openai_url} and {anthropic_url} are its URLs. Standard output gets
the report as JSON: ``exit_code`` (128 + signal where one ended it; None if it could not be started, which ``problem``
explains), ``stdout`` and ``output`` (all it wrote, last part), ``seconds``.

Standard library only: it runs on our own Python, in whatever image.
"""

import asyncio
import json
import os
import re
import sys
import tempfile
import time

KEPT_BYTES = 1 << 16
"""Of the program's output, the last; an answer that is longer than that is none."""
PIECE_BYTES = 1 << 16
DRAIN_S = 0.5
"""How long output is read on that something in the background may still hold open after the program's end."""


class Tail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * KEPT_BYTES:
            del self._data[:-KEPT_BYTES]

    def text(self) -> str:
        return self._data[-KEPT_BYTES:].decode("utf-8", "replace")


class Door:
    """Loopback to the gateway's socket."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """The port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket)
        except OSError as error:  # the program sees a connection that ends, and its output says why
            print(f"the language model's gateway cannot be reached: {error}", file=sys.stderr)
            writer.close()
            return
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction, to its end; who is gone on the one side is gone on the other."""
    try:
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


def filled(text: str, values: dict[str, str]) -> str:
    """``text`` with {name} replaced, once: what a value itself has in braces stays."""
    names = "|".join(map(re.escape, values))
    return re.sub(r"\{(" + names + r")\}", lambda found: values[found[1]], text)


def write_files(files: dict[str, str], values: dict[str, str]) -> None:
    for name, content in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(filled(content, values))


async def read(stream: asyncio.StreamReader, *tails: Tail) -> None:
    while data := await stream.read(PIECE_BYTES):
        for tail in tails:
            tail.add(data)


async def run(job: dict[str, object]) -> dict[str, object]:
    command, env, files, values = job["command"], job["env"], job["files"], job["values"]
    assert isinstance(command, list) and isinstance(env, dict) and isinstance(files, dict) and isinstance(values, dict)
    port = await Door(os.environ[f"PRORL_SOCKET_{str(job['socket']).upper()}"]).serve()
    urls = {"openai_url": f"http://127.0.0.1:{port}/v1", "anthropic_url": f"http://127.0.0.1:{port}"}
    place = os.path.join(tempfile.mkdtemp(prefix="agent-"), "instruction.txt")
    with open(place, "w", encoding="utf-8") as file:
        file.write(values["instruction"])
    values = {**values, **urls, "instruction_file": place}
    write_files(files, values)
    argv = [filled(word, values) for word in command]
    environment = {**os.environ, **{name: filled(value, values) for name, value in env.items()}}
    return await run_program(argv, environment)


async def run_program(argv: list[str], env: dict[str, str]) -> dict[str, object]:
    began = time.monotonic()
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        return {
            "exit_code": None,
            "problem": f"{argv[0]}: {error.strerror}",
            "stdout": "",
            "output": "",
            "seconds": 0.0,
        }
    stdout, output = Tail(), Tail()
    assert process.stdout is not None and process.stderr is not None
    reading = asyncio.gather(read(process.stdout, stdout, output), read(process.stderr, output))
    code = await process.wait()
    await asyncio.wait({reading}, timeout=DRAIN_S)
    reading.cancel()
    report = {"exit_code": code if code >= 0 else 128 - code, "problem": ""}
    return {**report, "stdout": stdout.text(), "output": output.text(), "seconds": time.monotonic() - began}


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report = asyncio.run(run(job))
    sys.stdout.write(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # connections that something in the background still holds are nobody's any more


if __name__ == "__main__":
    main()
