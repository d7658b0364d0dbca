"""The search itself: a walk over files in the order of their paths. Runs in a child of the server's, see searching.py."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter, deque

from prorl_hpc.sandbox.tools.globs import lone_brackets, matcher
from prorl_hpc.sandbox.tools.listing import plain
from prorl_hpc.sandbox.tools.toolset import Refused
from prorl_hpc.sandbox.tools.workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOUND, NOTHING_FOUND, REFUSED = 0, 1, 3
"""Exit codes; with REFUSED the reason is on stderr."""
MAX_DEPTH = 200
LINE_CHARS = 400
PIECE_BYTES = 1 << 20
"""Longer lines are searched in pieces."""
BINARY_BYTES = 8192
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Query:
    """What is looked for: the arguments of ``search``."""

    def __init__(
        self, pattern: str, path: str, glob: str, kind: str, ignore_case: bool, hidden: bool, context: int, limit: int
    ) -> None:
        self.pattern = pattern
        self.path = path
        self.glob = glob
        self.kind = kind
        self.ignore_case = ignore_case
        self.hidden = hidden
        self.context = context
        self.limit = limit


class Enough(Exception):
    """As many hits as were asked for."""


class Search:
    def __init__(self, workspace: Workspace, query: Query) -> None:
        self._workspace = workspace
        self._query = query
        self._hits = 0
        self._files = 0
        self._unread = 0
        self._inside: Counter[tuple[int, int]] | None = None
        self._written = bytearray()

    def report(self) -> int:
        """Write the hits to stdout; the exit code."""
        try:
            try:
                (self._names if self._query.kind == "name" else self._contents)()
            except Enough:
                self._write(f"[... more than {self._query.limit} hits: narrow the pattern, the path or the glob]")
        except Refused as error:
            os.write(2, str(error).encode("utf-8", "replace"))
            return REFUSED
        if not self._hits:
            searched = "names" if self._query.kind == "name" else "files"
            self._write(f"nothing was found: {self._files} {searched} searched{self._hint()}")
        if self._unread:
            self._write(f"[{self._unread} files or directories could not be read]")
        self._flush()
        return FOUND if self._hits else NOTHING_FOUND

    def _hint(self) -> str:
        query = self._query
        glob = query.pattern if query.kind == "name" else query.glob
        if lone := lone_brackets(glob):
            return f"; in the glob {glob!r}, {lone} has no partner and means itself"
        return f"; the glob {glob!r} fits none" if query.glob and not self._files else ""

    def _names(self) -> None:
        fits = _glob(self._query.pattern, self._query.ignore_case)
        for _, entry, path in self._walk():
            self._files += 1
            if fits(path, entry.name):
                self._hit()
                self._write(self._shown(path) + ("/" if entry.is_dir(follow_symlinks=False) else ""))

    def _contents(self) -> None:
        query = self._query
        find = _regex(query.pattern, query.ignore_case)
        real = self._workspace.resolve(query.path, root_too=True)
        if not os.path.isdir(real):
            with self._workspace.place(query.path) as place:
                self._lines(self._workspace.open_at(place, os.O_RDONLY), query.path, find)
            return
        fits = _glob(query.glob, False) if query.glob else None
        for directory, entry, path in self._walk():
            if not entry.is_file(follow_symlinks=False) or (fits and not fits(path, entry.name)):
                continue
            fd = self._open(directory, entry.name)
            if fd >= 0:
                self._lines(fd, self._shown(path), find)

    # -- files

    def _walk(self) -> Iterator[tuple[int, os.DirEntry[str], str]]:
        """(descriptor of the directory, entry, path below the start), without hidden ones unless they are asked for."""
        yield from self._below(self._workspace.open_directory(self._query.path), "", 0)

    def _below(self, fd: int, above: str, depth: int) -> Iterator[tuple[int, os.DirEntry[str], str]]:
        try:
            with os.scandir(fd) as found:
                entries = [entry for entry in found if self._query.hidden or not entry.name.startswith(".")]
            entries.sort(key=lambda e: e.name + "/" if e.is_dir(follow_symlinks=False) else e.name)
            for entry in entries:
                if entry.name == ".git":
                    continue
                yield fd, entry, above + entry.name
                if entry.is_dir(follow_symlinks=False):
                    inner = self._enter(fd, entry.name, depth)
                    if inner >= 0:
                        yield from self._below(inner, f"{above}{entry.name}/", depth + 1)
        finally:
            os.close(fd)

    def _enter(self, fd: int, name: str, depth: int) -> int:
        if depth < MAX_DEPTH:
            try:
                return os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=fd)
            except OSError:
                pass  # counted below
        self._unread += 1
        return -1

    def _open(self, directory: int, name: str) -> int:
        """A descriptor of a regular file of the workspace, or -1."""
        try:
            fd = os.open(name, _OPEN, dir_fd=directory)
        except OSError:
            self._unread += 1
            return -1
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and (found.st_nlink == 1 or self._all_names_inside(found)):
            return fd
        os.close(fd)
        self._unread += 1
        return -1

    def _all_names_inside(self, found: os.stat_result) -> bool:
        if self._inside is None:
            self._inside = self._workspace.count_names()
        return self._workspace.open_paths or self._inside[found.st_dev, found.st_ino] >= found.st_nlink

    def _lines(self, fd: int, path: str, find: Callable[[str], re.Match[str] | None]) -> None:
        self._files += 1
        context = self._query.context
        before: deque[tuple[int, str]] = deque(maxlen=context)
        number, last_shown, after = 1, 0, 0
        with os.fdopen(fd, "rb") as file:
            if b"\0" in file.peek(BINARY_BYTES)[:BINARY_BYTES]:
                return
            while piece := file.readline(PIECE_BYTES):
                line = piece.decode("utf-8", "replace").rstrip("\r\n")
                if match := find(line):
                    self._hit()
                    if context and last_shown and number - len(before) > last_shown + 1:
                        self._write("--")
                    for earlier, text in before:
                        self._write(f"{path}-{earlier}-{_cut(text)}")
                    before.clear()
                    self._write(f"{path}:{number}:{_cut(line, match)}")
                    last_shown, after = number, context
                elif after:
                    after -= 1
                    last_shown = number
                    self._write(f"{path}-{number}-{_cut(line)}")
                elif context:
                    before.append((number, line[:LINE_CHARS]))
                number += piece.endswith(b"\n")
        self._flush()

    # -- output

    def _shown(self, path: str) -> str:
        start = self._query.path.rstrip("/")
        return plain(path if start in ("", ".") else f"{start}/{path}")

    def _hit(self) -> None:
        if self._hits == self._query.limit:
            raise Enough
        self._hits += 1

    def _write(self, line: str) -> None:
        self._written += line.encode("utf-8", "replace") + b"\n"
        if len(self._written) > 8192:
            self._flush()

    def _flush(self) -> None:
        """To the server at once: should this be killed, what was found until then counts."""
        while self._written:
            del self._written[: os.write(1, self._written)]


def _regex(pattern: str, ignore_case: bool) -> Callable[[str], re.Match[str] | None]:
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0).search
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(
            f"pattern {pattern[:200]!r} is not a regular expression of Python's: {error}. To find these very characters "
            "put a backslash before each of . ^ $ * + ? ( ) [ ] { } | \\"
        ) from None


def _glob(pattern: str, ignore_case: bool) -> Callable[[str, str], bool]:
    try:
        return matcher(pattern, ignore_case=ignore_case)
    except (re.error, OverflowError, RecursionError):
        raise Refused(f"{pattern[:200]!r} is no glob: * ? ** [a-z] {{a,b}} are understood, as in src/**/*.py") from None


def _cut(line: str, match: re.Match[str] | None = None) -> str:
    """A long line around what was found in it."""
    if len(line) <= LINE_CHARS:
        return line
    start = max(0, min(match.start() - LINE_CHARS // 4, len(line) - LINE_CHARS)) if match else 0
    end = start + LINE_CHARS
    return f"{'[...]' if start else ''}{line[start:end]}{'[...]' if end < len(line) else ''}"
