"""The directory that a Dockerfile copies from, less what .dockerignore leaves out.

Apptainer's %files knows no exceptions and follows links, and fails at one that leads nowhere. So a directory is given to it
whole only where it holds neither; else its parts are, one by one.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.messages.errors import SandboxError


@dataclass(frozen=True)
class Piece:
    """Of what is copied. ``place``: relative to the source, empty for the source itself."""

    path: Path
    place: str
    kind: str
    """whole (a file, or a directory without exceptions), directory (to be made, its content follows) or link."""


class BuildContext:
    def __init__(self, dockerfile: Path) -> None:
        self.directory = dockerfile.parent
        named = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
        file = named if named.is_file() else self.directory / ".dockerignore"
        self._rules = _rules(file) if file.is_file() else []
        self._exceptions = any(keeps for _, keeps in self._rules)

    def ignores(self, path: Path) -> bool:
        """The last rule that fits the path, or a directory that it lies in, decides."""
        place = path.relative_to(self.directory).as_posix()
        places = [place, *(str(parent) for parent in Path(place).parents)][:-1] if place != "." else []
        ignored = False
        for pattern, keeps in self._rules:
            if keeps == ignored and any(pattern.fullmatch(part) for part in places):
                ignored = not keeps
        return ignored

    def find(self, pattern: str) -> list[Path]:
        """What COPY's source means, by name. ValueError for a pattern that is none, or leads out of the context."""
        normal = posixpath.normpath(pattern.lstrip("/") or ".")
        paths = [self.directory] if normal == "." else sorted(self.directory.glob(normal))
        if any(not path.resolve().is_relative_to(self.directory.resolve()) for path in paths):
            raise ValueError(f"it lies outside of {self.directory}")
        return [path for path in paths if not self.ignores(path) or (self._exceptions and path.is_dir())]

    def pieces(self, source: Path) -> list[Piece]:
        """What to copy so that ``source`` arrives, a link within it as a link."""
        if not source.is_dir():
            return [Piece(source, "", "whole")]
        return list(self._walk(source, ""))

    def _walk(self, directory: Path, place: str) -> Iterator[Piece]:
        below: list[Piece] = []
        whole = True
        for entry in sorted(os.scandir(directory), key=lambda found: found.name):
            path, here = Path(entry.path), posixpath.join(place, entry.name)
            ignored = self.ignores(path)
            if entry.is_dir(follow_symlinks=False):
                inner = list(self._walk(path, here)) if not ignored or self._exceptions else []
                if ignored:  # only what an exception keeps is there, and its directory with it
                    inner = inner if any(piece.kind != "directory" for piece in inner) else []
                whole &= [piece.kind for piece in inner] == ["whole"]
                below += inner
            elif ignored:
                whole = False
            else:
                whole &= not entry.is_symlink()
                below.append(Piece(path, here, "link" if entry.is_symlink() else "whole"))
        if whole and not (self.ignores(directory) and not below):
            yield Piece(directory, place, "whole")
        else:
            yield Piece(directory, place, "directory")
            yield from below


def _rules(file: Path) -> list[tuple[re.Pattern[str], bool]]:
    """(pattern, whether it keeps what fits it), in the order of the file."""
    found = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        keeps = pattern.startswith("!")
        pattern = posixpath.normpath(pattern.removeprefix("!").strip()).lstrip("/")
        if pattern in ("", "."):
            continue
        try:
            found.append((re.compile(_expression(pattern), re.DOTALL), keeps))
        except re.error as error:
            raise SandboxError(f"{file}, line {number}: {line.strip()!r} is not a pattern: {error}") from None
    return found


def _expression(pattern: str) -> str:
    """Go's filepath.Match, and ``**`` for any number of directories."""
    token = re.compile(r"\*\*/|\*\*|\*|\?|\[\^?[^]]+\]|\\.|.", re.DOTALL)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = []
    for part in token.findall(pattern):
        if len(part) > 2 and part.startswith("["):
            parts.append(part)
        else:
            parts.append(meaning.get(part) or re.escape(part[-1]))
    return "".join(parts)
