"""One command of a shell: what is written to the shell for it, and what comes back."""

from __future__ import annotations

import re

from prorl_hpc.sandbox.tools.output import BoundedOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prorl_hpc.sandbox.tools.terminal import Terminal

SHELLS_TERMINAL = "/dev/tty"
"""The shell's own, and that of interactive commands: from it, programs read what a person types."""
INTERRUPTED = 130
"""The exit code of what SIGINT ended."""
LONGEST_MARK = 1 << 16
"""There are directories with names of more than PATH_MAX bytes: of several parts, each made in the one before."""
_MARK = re.compile(rb"(\d{1,9}):(\d{1,3}):(.*)", re.DOTALL)


class Marks:
    """How a shell says that it got to a certain point: \\1 nonce : serial : exit code : directory \\2.

    The nonce is known to the shell alone, the serial rises: an older mark that comes late means nothing."""

    def __init__(self, nonce: str) -> None:
        self.head = f"\x01{nonce}:".encode()
        self.serial = 0
        self._format = "\\command printf '\\001" + nonce + ':{}:%s:%s\\002\' "$?" "${{PWD-}}" >{}\n'

    def line(self, terminal: str) -> str:
        """A line that makes the shell write the next one."""
        self.serial += 1
        return self._format.format(self.serial, terminal)

    def last(self, data: bytes) -> tuple[int, int] | None:
        """Serial and exit code of the last whole mark in it."""
        start = data.rfind(self.head)
        end = data.find(b"\x02", start) if start >= 0 else -1
        if end < 0:
            return None
        mark = read_mark(data[start + len(self.head) : end])
        return mark and mark[:2]


def read_mark(mark: bytes) -> tuple[int, int, bytes] | None:
    """Serial, exit code and directory; None where a command has forged it (with ``trap ... DEBUG`` it can see ours)."""
    found = _MARK.fullmatch(mark)
    return (int(found[1]), int(found[2]), found[3]) if found else None


class Command:
    """Its text, its output, and whether it is over: when its terminal brings the mark that was asked for last.

    The mark is on the command's own line, which is the quickest. But an error may throw the shell back to its prompt,
    past the rest of that line; so for what is not over at once a next line writes a mark to the shell's own terminal. Where
    that one comes alone, the command is over, and a third mark, again in its terminal, shows where its output ends."""

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
        self.following_bytes = 0
        """Of what the shell is given to read after the command's own text."""
        self._marks = marks
        self._terminal_name = terminal.name if terminal else SHELLS_TERMINAL
        self._first = self._awaited = self._fallback = 0
        """Serials: of the first mark that is not earlier than the command, of that which ends it, of the next line's."""
        self._fallback_code: int | None = None
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
        line = f"\\command eval {quoted} <{stdin} >{name} 2>&1"
        if last_code:
            line = f"(exit {last_code}); {line}"
        if self.interactive:  # what the shell itself wrote before is not this command's
            line = self._marks.line(name) + line
        line += "; " + self._marks.line(name)
        self._first = self._awaited = self._marks.serial
        self._fallback = self.following_bytes = 0
        return line.encode("utf-8", "replace")

    @property
    def has_fallback(self) -> bool:
        return self._fallback > 0

    def fallback(self) -> bytes:
        """The line behind it, with a mark on the shell's own terminal."""
        line = self._marks.line(SHELLS_TERMINAL).encode()
        self._fallback = self._marks.serial
        self.following_bytes += len(line)
        return line

    def probe(self) -> bytes:
        """For a shell that may have lost the mark."""
        line = self._marks.line(self._terminal_name).encode()
        self._awaited = self._marks.serial
        self.following_bytes += len(line)
        return line

    def lost_its_mark(self, serial: int, code: int) -> bool:
        """Whether this mark on the shell's own terminal says so: the shell is to be probed."""
        if self.done or serial != self._fallback:
            return False
        self._fallback_code = code
        return True

    def feed(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
            self._held = b""
        head = self._marks.head
        while not self.done:
            start = data.find(head)
            end = data.find(b"\x02", start) if start >= 0 else -1
            if end < 0 and 0 <= start < len(data) - LONGEST_MARK:  # forged, and without end
                self._add(data[: start + len(head)])
                data = data[start + len(head) :]
                continue
            if end < 0:
                # What may yet become a mark waits; the rest is output.
                last = data.rfind(b"\x01", max(0, len(data) - len(head)))
                keep = start if start >= 0 else last if last >= 0 else len(data)
                self._held = data[keep:]
                self._add(data[:keep] if self._held else data)
                return
            mark = read_mark(data[start + len(head) : end])
            self._add(data[: start if mark else end + 1])
            if mark:
                self._mark(*mark)
            data = data[end + 1 :]

    def news(self) -> BoundedOutput:
        """What came since this was last asked."""
        news, self._news = self._news or self.output, BoundedOutput(self._limit)
        return news

    def _mark(self, serial: int, code: int, cwd: bytes) -> None:
        if serial < self._first:  # all before it is older than this command
            self.output, self._news = BoundedOutput(self._limit), None
            return
        if self.exit_code is None:
            # After the first two, the shell tells the code of its printf for the mark before.
            later = self._fallback_code if self._fallback_code is not None else INTERRUPTED
            self.exit_code = code if serial <= max(self._first, self._fallback) else later
        self.cwd = cwd.decode("utf-8", "replace")
        self.done = serial >= self._awaited

    def _add(self, data: bytes) -> None:
        if data and not self.muted:
            self.output.add(data)
            if self._news is not None:
                self._news.add(data)
