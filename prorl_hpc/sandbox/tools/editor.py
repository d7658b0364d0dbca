"""``edit``: view, create, str_replace, insert and undo, as language models know them."""

from __future__ import annotations

import os
import stat

from prorl_hpc.sandbox.tools.edit_history import Change, History
from prorl_hpc.sandbox.tools.edit_text import Document, around, encoded, numbered
from prorl_hpc.sandbox.tools.listing import list_directory
from prorl_hpc.sandbox.tools.rewriting import rewrite
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused
from prorl_hpc.sandbox.tools.workspace import Workspace, refusal, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar

MAX_BYTES = 10 << 20
"""Larger files are for bash."""
NO_LINE = -1
COMMANDS: dict[str, tuple[str, ...]] = {
    "view": ("view_from", "view_to"),
    "create": ("text",),
    "str_replace": ("old", "new"),
    "insert": ("line", "text"),
    "undo": (),
}
"""Command → the arguments that it takes beside path."""


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {
        "edit": {
            "command": str,
            "path": str,
            "text": "",
            "old": "",
            "new": "",
            "line": NO_LINE,
            "view_from": 0,
            "view_to": 0,
        }
    }

    def __init__(self, host: Host) -> None:
        self._workspace = Workspace(host)
        self._room = host.settings.output_limit_bytes
        self._history = History()

    def edit(self, call: Call, command: str, path: str, **given: Any) -> Answer:
        """One command on one file; ``view`` also takes a directory. Refused with what to do instead."""
        if command not in COMMANDS:
            raise Refused(f"unknown command {command!r}: edit has {', '.join(COMMANDS)}")
        defaults = self.TOOLS["edit"]
        for name in given:
            if given[name] != defaults[name] and name not in COMMANDS[command]:
                takes = ", ".join(("path", *COMMANDS[command]))
                raise Refused(f"{command} takes {takes}; {name} was given too: leave it out or use another command")
        if command == "insert" and given.get("line", NO_LINE) == NO_LINE:
            raise Refused("insert needs line: the number of the line after which text is put, 0 for the top")
        arguments = {name: given.get(name, defaults[name]) for name in COMMANDS[command]}
        method: Callable[..., str] = getattr(self, f"_{command}")
        return Answer(method(path, **arguments))

    # -- commands

    def _view(self, path: str, view_from: int, view_to: int) -> str:
        if stat.S_ISDIR(self._mode(path)):
            if view_from or view_to:
                raise Refused(f"{shown(path)} is a directory: view_from and view_to are for files")
            return list_directory(self._workspace.open_directory(path), path, self._room)
        with self._workspace.place(path) as place:
            fd = self._workspace.open_at(place, os.O_RDONLY)
            try:
                content = self._workspace.read(fd, place, MAX_BYTES)
            finally:
                os.close(fd)
        document = self._document(content, path, as_far_as_it_is=True)
        lines = document.lines()
        count = len(lines)
        first, last = view_from or 1, count if view_to in (0, -1) else min(view_to, count)
        if not lines:
            return f"{shown(path)} is empty\n"
        if not (1 <= first <= count and first <= last):
            raise Refused(
                f"view_from {view_from} and view_to {view_to} name no lines: {shown(path)} has lines 1 to {count}, and "
                "view_to 0 is the end"
            )
        text, last_shown = numbered(lines, first, last, self._room)
        if last_shown < last:
            text += f"[... cut here: {last - last_shown} more lines; go on with view_from={last_shown + 1}]\n"
        return f"{shown(path)}, lines {first} to {last_shown} of {count}{_remarks(document, content)}:\n{text}"

    def _create(self, path: str, text: str) -> str:
        content = encoded(text)
        with self._workspace.place(path, make=True) as place:
            fd = self._workspace.open_at(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                self._workspace.write(fd, content, path)
            except BaseException:
                os.unlink(place.name, dir_fd=place.directory)
                raise
            finally:
                os.close(fd)
            self._history.record(Change(place.path, None, content))
        return f"{shown(path)} was created with {text.count(chr(10)) + (not text.endswith(chr(10)))} lines\n"

    def _str_replace(self, path: str, old: str, new: str) -> str:
        return self._change(path, lambda document: document.replace(old, new))

    def _insert(self, path: str, line: int, text: str) -> str:
        return self._change(path, lambda document: document.insert(line, text))

    def _undo(self, path: str) -> str:
        with self._workspace.place(path) as place:
            change = self._history.last(place.path)
            if change is None:
                raise Refused(f"there is no edit of {shown(path)} to undo: only changes made by edit can be undone")
            fd = self._workspace.open_at(place, os.O_RDWR)
            try:
                found = os.fstat(fd)
                content = self._workspace.read(fd, place, MAX_BYTES)
                if not change.left(content):
                    raise Refused(
                        f"{shown(path)} was changed by something else since the last edit, which therefore cannot be "
                        "undone: view it and change it with str_replace"
                    )
                if change.made_the_file:
                    os.unlink(place.name, dir_fd=place.directory)
                    self._history.forget(change)
                    return f"{shown(path)} was removed: the edit that was undone had created it\n"
                before, start, end = change.undone(content)
                rewrite(self._workspace, place, fd, found, content, before)
                self._history.forget(change)
            except OSError as error:
                raise refusal(path, error) from None
            finally:
                os.close(fd)
        document = Document(before)
        first, last = before.count(b"\n", 0, start) + 1, before.count(b"\n", 0, end) + 1
        return self._edited(path, "the last edit was undone", document, first, last)

    # -- what they share

    def _change(self, path: str, edit: Callable[[Document], tuple[int, int]]) -> str:
        with self._workspace.place(path) as place:
            fd = self._workspace.open_at(place, os.O_RDWR)
            try:
                found = os.fstat(fd)
                before = self._workspace.read(fd, place, MAX_BYTES)
                document = self._document(before, path)
                try:
                    first, last = edit(document)
                except Refused as error:
                    raise Refused(f"{shown(path)} was not changed: {error}") from None
                after = document.encode()
                rewrite(self._workspace, place, fd, found, before, after)
            finally:
                os.close(fd)
            self._history.record(Change(place.path, before, after))
        return self._edited(path, "was edited", document, first, last)

    def _edited(self, path: str, what: str, document: Document, first: int, last: int) -> str:
        snippet = around(document.lines(), first, last, self._room)
        return (
            f"{shown(path)}: {what}. It now reads there:\n{snippet}"
            if snippet
            else f"{shown(path)}: {what}. It is empty now\n"
        )

    def _document(self, content: bytes, path: str, *, as_far_as_it_is: bool = False) -> Document:
        try:
            return Document(content, as_far_as_it_is=as_far_as_it_is)
        except Refused as error:
            raise Refused(f"{shown(path)} {error}") from None

    def _mode(self, path: str) -> int:
        try:
            return os.stat(self._workspace.resolve(path, root_too=True), follow_symlinks=False).st_mode
        except OSError as error:
            raise refusal(path, error) from None


def _remarks(document: Document, content: bytes) -> str:
    remarks = []
    if document.mixed:
        remarks.append("CRLF and LF line endings")
    elif document.newline == "\r\n":
        remarks.append("CRLF line endings, kept by edits")
    if document.bom:
        remarks.append("byte order mark, kept by edits")
    if content and not content.endswith(b"\n"):
        remarks.append("no newline at the end")
    if "�" in document.text and "�".encode() not in content:
        remarks.append("not UTF-8: invalid bytes are shown as �")
    return f" ({'; '.join(remarks)})" if remarks else ""
