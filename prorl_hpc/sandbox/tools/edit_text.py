"""Text that is edited: its lines, its line endings, and the one place in it that is meant."""

from __future__ import annotations

import codecs
import difflib
import re
import time

from prorl_hpc.sandbox.tools.toolset import Refused

LINE_CHARS = 2000
"""Longer lines are shown cut."""
AROUND_LINES = 4
"""Lines shown before and after an edit."""
NEAREST_S = 0.2
"""How long the nearest line, or the text but for its white space, may be looked for."""
PLACES_NAMED = 20


class Document:
    """A file as text. Line numbers count from 1; a line ends with LF, and where all do, with CRLF."""

    def __init__(self, content: bytes, *, as_far_as_it_is: bool = False) -> None:
        """Refused for what is not UTF-8 text, unless ``as_far_as_it_is``: then what is invalid is replaced."""
        if b"\0" in content:
            raise Refused("is a binary file (it holds NUL bytes): look at it with bash (file, xxd, strings)")
        self.bom = content.startswith(codecs.BOM_UTF8)
        body = content[len(codecs.BOM_UTF8) :] if self.bom else content
        try:
            self.text = body.decode("utf-8", "replace" if as_far_as_it_is else "strict")
        except UnicodeDecodeError as error:
            line = body.count(b"\n", 0, error.start) + 1
            raise Refused(
                f"is not UTF-8 text (line {line} has the byte 0x{body[error.start]:02x}), and writing it back would "
                "change it: convert it with bash (iconv) first, or edit it there (sed)"
            ) from None
        crlf, lf = self.text.count("\r\n"), self.text.count("\n")
        self.newline = "\r\n" if crlf and crlf == lf else "\n"
        self.mixed = 0 < crlf < lf

    def encode(self) -> bytes:
        return (codecs.BOM_UTF8 if self.bom else b"") + encoded(self.text)

    def lines(self) -> list[str]:
        lines = self.text.split(self.newline)
        return lines[:-1] if lines[-1] == "" else lines

    def as_here(self, text: str) -> str:
        """An agent's text with this file's line endings."""
        return text.replace("\r\n", "\n").replace("\n", "\r\n") if self.newline == "\r\n" else text

    def line_at(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def replace(self, old: str, new: str) -> tuple[int, int]:
        """Put ``new`` where ``old`` is, exactly once; returns the first and last line of it. Refused otherwise."""
        old, new = self.as_here(old), self.as_here(new)
        if not old:
            raise Refused("old is empty: give the text that is to be replaced, or use insert")
        if old == new:
            raise Refused("old and new are the same: nothing would change")
        start = self.text.find(old)
        if start < 0:
            raise Refused(f"old was not found. {self._why_not_found(old)}")
        if self.text.find(old, start + 1) >= 0:
            raise Refused(self._several(old, start))
        self.text = self.text[:start] + new + self.text[start + len(old) :]
        return self.line_at(start), self.line_at(start + max(0, len(new) - 1))

    def insert(self, line: int, text: str) -> tuple[int, int]:
        """Put lines after line ``line`` (0: at the top); returns the first and last of them. Refused if not there."""
        count = len(self.lines())
        if not 0 <= line <= count:
            raise Refused(
                f"line is {line}: the file has {count} lines, so it is 0 (at the top) to {count} (at the end)"
            )
        if not text:
            raise Refused("text is empty: there is nothing to insert")
        added = self.as_here(text.removesuffix("\n"))
        position = 0
        for _ in range(line):
            position = self.text.find("\n", position) + 1 or len(self.text)
        open_end = position == len(self.text) and self.text != "" and not self.text.endswith("\n")
        if open_end:  # and it stays so, unless the last line would be empty, which takes a line end to be there
            added = self.newline + added + (self.newline if added == "" or added.endswith("\n") else "")
        else:
            added += self.newline
        self.text = self.text[:position] + added + self.text[position:]
        return line + 1, line + max(1, added.count("\n"))

    def _several(self, old: str, start: int) -> str:
        places: list[str] = []
        while start >= 0 and len(places) <= PLACES_NAMED:
            places.append(str(self.line_at(start)))
            start = self.text.find(old, start + 1)
        more = len(places) > PLACES_NAMED
        found = f"more than {PLACES_NAMED} times" if more else f"{len(places)} times"
        where = ", ".join(places[:PLACES_NAMED]) + (", ..." if more else "")
        return f"old was found {found} (in lines {where}): add lines around it so that it is found once"

    def _why_not_found(self, old: str) -> str:
        lines = self.lines()
        wanted = old.replace("\r\n", "\n").strip("\n").split("\n")
        if re.match(r" *\d+\t", wanted[0]):
            return "It begins with a line number: leave out what view shows before each line"
        if self.mixed and old.replace("\r\n", "\n") in self.text.replace("\r\n", "\n"):
            return "The file mixes CRLF and LF line endings: give each line of old with the ending it has in the file"
        bare = [line.strip() for line in wanted]
        if any(bare):
            stripped = [line.strip() for line in lines]
            until = time.monotonic() + NEAREST_S
            for number in range(len(lines) - len(bare) + 1):
                if time.monotonic() > until:  # many lines of both are the same
                    break
                if stripped[number] == bare[0] and stripped[number : number + len(bare)] == bare:
                    shown = numbered(lines, number + 1, number + len(bare), 2000)[0]
                    return f"But for white space it is here; give it exactly as it is:\n{shown}"
        near = nearest(lines, max(bare, key=len))
        if near:
            shown = numbered(lines, max(1, near - 2), min(len(lines), near + 2), 2000)[0]
            return f"The nearest lines in the file:\n{shown}"
        return "Nothing in the file is like it: view the file"


def encoded(text: str) -> bytes:
    """Refused for what is no Unicode text."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Refused(
            f"character {error.start} of the text is half of a surrogate pair, which no file can hold"
        ) from None


def nearest(lines: list[str], wanted: str) -> int:
    """The number of the line that is most like ``wanted``, 0 if none is much like it or there is no time to look."""
    until = time.monotonic() + NEAREST_S
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted[:200])
    best, found = 0.6, 0
    for number, line in enumerate(lines, 1):
        if time.monotonic() > until:
            break
        matcher.set_seq1(line.strip()[:200])
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, found = matcher.ratio(), number
    return found


def numbered(lines: list[str], first: int, last: int, room: int) -> tuple[str, int]:
    """Lines ``first`` to ``last`` with their numbers, as many as fit into ``room`` bytes; and the last one shown."""
    shown: list[str] = []
    for number in range(first, last + 1):
        line = lines[number - 1]
        if len(line) > LINE_CHARS:
            line = f"{line[:LINE_CHARS]}[... {len(line) - LINE_CHARS} more characters]"
        entry = f"{number:6}\t{line}\n"
        room -= len(entry.encode("utf-8", "replace"))
        if room < 0 and shown:
            return "".join(shown), number - 1
        shown.append(entry)
    return "".join(shown), last


def around(lines: list[str], first: int, last: int, room: int) -> str:
    """The changed lines and some around them, for an answer."""
    first, last = max(1, first - AROUND_LINES), min(len(lines), last + AROUND_LINES)
    text, shown = numbered(lines, first, last, room)
    return text if shown == last else text + f"[... up to line {last}]\n"
