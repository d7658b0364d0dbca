"""One command of a shell: what is written to the shell for it, and what comes back."""

from __future__ import annotations

from prorl_hpc.sandbox.tools.output import BoundedOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prorl_hpc.sandbox.tools.terminal import Terminal

INTERACTIVE_TERMINAL = "/dev/tty"
"""The shell's own; from it, programs read what a person types."""


class Marks:
    """How a shell says that it got to a certain point: \\1 nonce : serial : exit code : directory \\2.

    The nonce is known to the shell alone, the serial rises: an older mark that comes late means nothing."""

    def __init__(self, nonce: str) -> None:
        self.head = f"\x01{nonce}:".encode()
        self.serial = 0
        self._format = "\\command printf '\\001" + nonce + ':{}:%s:%s\\002\' "$?" "$PWD" >{}\n'

    def line(self, terminal: str) -> str:
        """A line that makes the shell write the next one."""
        self.serial += 1
        return self._format.format(self.serial, terminal)


class Command:
    """Its text, its output, and whether it is over: when the newest mark arrived, so that nothing that was written to
    the shell is still unread then."""

    def __init__(self, text: str, marks: Marks, terminal: Terminal | None, limit: int) -> None:
        """Without a terminal of its own it runs on the shell's: interactive."""
        self.text = text
        self.terminal = terminal
        self.output = BoundedOutput(limit)
        self.exit_code: int | None = None
        self.cwd = ""
        self.done = False
        self.muted = False
        self.kept = False
        """It goes on, and no call waits for it."""
        self._marks = marks
        self._terminal_name = terminal.name if terminal else INTERACTIVE_TERMINAL
        self._begin = 0
        self._limit = limit
        self._news: BoundedOutput | None = None
        self._held = b""

    @property
    def interactive(self) -> bool:
        return self.terminal is None

    def script(self, last_code: int) -> bytes:
        """What the shell is to read. ``last_code``: $? is what it was, whatever our marks did to it."""
        quoted = "'" + self.text.replace("'", "'\\''") + "'"
        name = self._terminal_name
        stdin = name if self.interactive else "/dev/null"
        # "command" keeps a syntax error from throwing sh back to its prompt, past the mark.
        line = f"\\command eval {quoted} <{stdin} >{name} 2>&1\n"
        if last_code:
            line = f"(exit {last_code}); {line}"
        if self.interactive:  # what the shell itself wrote before is not this command's
            line = self._marks.line(name) + line
            self._begin = self._marks.serial
        return (line + self._marks.line(name)).encode("utf-8", "replace")

    def probe(self) -> bytes:
        """For a shell that was interrupted, and may have lost the mark."""
        return self._marks.line(self._terminal_name).encode()

    def feed(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
            self._held = b""
        head = self._marks.head
        while not self.done:
            start = data.find(head)
            end = data.find(b"\x02", start) if start >= 0 else -1
            if end < 0:
                # What may yet become a mark waits; the rest is output.
                last = data.rfind(b"\x01", max(0, len(data) - len(head)))
                keep = start if start >= 0 else last if last >= 0 else len(data)
                self._held = data[keep:]
                self._add(data[:keep] if self._held else data)
                return
            self._add(data[:start])
            self._mark(data[start + len(head) : end])
            data = data[end + 1 :]

    def news(self) -> BoundedOutput:
        """What came since this was last asked."""
        news, self._news = self._news or self.output, BoundedOutput(self._limit)
        return news

    def _mark(self, mark: bytes) -> None:
        serial, code, cwd = mark.split(b":", 2)
        if int(serial) <= self._begin:
            self.output, self._news = BoundedOutput(self._limit), None
            return
        if self.exit_code is None:  # a later mark tells the code of the earlier one's printf
            self.exit_code = int(code)
        self.cwd = cwd.decode("utf-8", "replace")
        self.done = int(serial) == self._marks.serial

    def _add(self, data: bytes) -> None:
        if data and not self.muted:
            self.output.add(data)
            if self._news is not None:
                self._news.add(data)
