"""The paths that every file tool goes through: none leaves the workspace.

A path is resolved first, links followed as far as they stay inside, and then walked again from the workspace's root,
one directory at a time and following nothing: what is swapped for a link in between is refused, not followed.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections import Counter

from prorl_hpc.sandbox.tools.toolset import Host, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

WORKSPACE = "/workspace"
"""How paths name the root, even where it is another directory."""
LINKS_LOOKED_AT = 200_000
"""Directory entries that are looked at to find all names of a file with several."""
PATH_BYTES = 4095
SHOWN_CHARS = 200
_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO, which would block",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link that was put there just now",
}
_HINTS = {
    errno.ENOENT: "look at what is there with `edit view` on the directory",
    errno.ENOTDIR: "a part of the path is a file or was swapped for a link, not a directory",
    errno.ENOSPC: "remove files that are not needed",
    errno.EDQUOT: "remove files that are not needed",
    errno.EROFS: "in this sandbox only the workspace and /tmp can be written",
    errno.ENAMETOOLONG: "a name has at most 255 bytes, a path 4095",
    errno.ELOOP: "its symbolic links lead in a circle, or one was put there just now",
}


def shown(path: str) -> str:
    """A path for a message: on one line, and not longer than a reader wants it."""
    text = path if len(path) <= SHOWN_CHARS else path[:SHOWN_CHARS] + f"[... {len(path) - SHOWN_CHARS} more characters]"
    return repr(text)


def refusal(path: str, error: OSError) -> Refused:
    """What the system said of ``path``, with what to do about it where that is known."""
    hint = _HINTS.get(error.errno or 0, "")
    return Refused(f"{shown(path)}: {error.strerror or error}" + (f" ({hint})" if hint else ""))


def _step(above: int, name: str, make: bool) -> int:
    try:
        return os.open(name, _WALK, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
        try:
            os.mkdir(name, dir_fd=above)
        except FileExistsError:
            pass  # somebody else was quicker
        return os.open(name, _WALK, dir_fd=above)


class Place:
    """A directory that is open, and a name in it; ``path`` is both, for people and for comparing."""

    def __init__(self, directory: int, name: str, path: str, given: str) -> None:
        self.directory = directory
        self.name = name
        self.path = path
        self.given = given

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.directory)


class Workspace:
    def __init__(self, host: Host) -> None:
        self.root = os.path.realpath(host.settings.root)
        self.open_paths = host.settings.open_paths
        self._max_file_bytes = host.settings.limits.get("max_file_mib", 0) << 20

    def resolve(self, path: str, *, root_too: bool = False) -> str:
        """The real path. ``root_too``: the workspace itself will do. Refused for what leaves it."""
        if "\0" in path:
            raise Refused(f"the path {shown(path)} holds a NUL byte, which no path can")
        inside = path
        if path == WORKSPACE or path.startswith(WORKSPACE + "/"):
            inside = path[len(WORKSPACE) :].lstrip("/")
        try:
            if len(os.fsencode(path)) > PATH_BYTES:
                raise refusal(path, OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)))
        except UnicodeEncodeError:
            raise Refused(f"the path {shown(path)} holds characters that no file name can") from None
        try:
            real = os.path.realpath(os.path.join(self.root, inside))
        except OSError as error:  # what was a link just now is none any more
            raise refusal(path, error) from None
        if self.open_paths or real.startswith(self.root + "/") or (root_too and real == self.root):
            return real
        raise Refused(f"the path {shown(path)} leaves the workspace: expected a file below {WORKSPACE}")

    def place(self, path: str, *, make: bool = False) -> Place:
        """Where the file ``path`` is or will be; ``make``: with the directories that are missing."""
        real = self.resolve(path)
        parent, name = os.path.split(real)
        if not name:
            raise Refused(f"{shown(path)} is a directory")
        if path.endswith("/"):
            raise Refused(f"{shown(path)} names a directory: a file is meant here")
        return Place(self._walk(parent, path, make), name, real, path)

    def open(self, path: str, flags: int) -> int:
        """A file descriptor of a regular file; see ``open_at``."""
        with self.place(path, make=bool(flags & os.O_CREAT)) as place:
            return self.open_at(place, flags)

    def open_at(self, place: Place, flags: int) -> int:
        """A file descriptor of a regular file with all its names in the workspace. Never waits (a FIFO would), follows
        no link at the end of the path, and cuts nothing off before it is known what it is."""
        checked = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        try:
            kind = stat.S_IFMT(os.stat(place.name, dir_fd=place.directory, follow_symlinks=False).st_mode)
            if kind != stat.S_IFREG:  # some devices do things when they are opened
                raise Refused(f"{shown(place.given)} is {_KINDS.get(kind, 'special')}, not a regular file")
        except FileNotFoundError as error:
            if not flags & os.O_CREAT:
                raise refusal(place.given, error) from None
        except OSError as error:
            raise refusal(place.given, error) from None
        try:
            fd = os.open(place.name, checked, 0o644, dir_fd=place.directory)
        except FileExistsError:
            raise Refused(
                f"{shown(place.given)} exists already and is not overwritten: change it with str_replace or insert, or "
                "remove it first (rm)"
            ) from None
        except OSError as error:
            raise refusal(place.given, error) from None
        try:
            self._check(fd, place)
            if flags & os.O_TRUNC:
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_directory(self, path: str) -> int:
        """A file descriptor of a directory, to list it."""
        fd = self._walk(self.resolve(path, root_too=True), path, make=False)
        try:
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        except OSError as error:
            raise refusal(path, error) from None
        finally:
            os.close(fd)

    def write(self, fd: int, content: bytes, given: str) -> None:
        """All of ``content`` at the descriptor's position, or a Refused that says why not; the server itself has no
        limit on the size of files, its children have."""
        end = os.lseek(fd, 0, os.SEEK_CUR) + len(content)
        if self._max_file_bytes and end > self._max_file_bytes:
            raise Refused(f"{shown(given)} would have {end} bytes: a file has at most {self._max_file_bytes} here")
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError as error:
            raise refusal(given, error) from None

    def read(self, fd: int, place: Place, most: int) -> bytes:
        """All of a file. Refused where it has more than ``most`` bytes."""
        try:
            content = bytearray()
            while len(content) <= most and (more := os.pread(fd, most + 1 - len(content), len(content))):
                content += more
        except OSError as error:
            raise refusal(place.given, error) from None
        if len(content) > most:
            raise Refused(
                f"{shown(place.given)} is larger than {most >> 20} MiB: use bash (sed -n 'FROM,TOp', sed -i, grep)"
            )
        return bytes(content)

    def _walk(self, directory: str, given: str, make: bool) -> int:
        """O_PATH descriptor of a real path, no link followed below the root."""
        start = "/" if self.open_paths else self.root
        fd = -1
        try:
            fd = os.open(start, _WALK)
            for name in directory[len(start) :].split("/"):
                if not name:
                    continue
                above = fd
                fd = _step(above, name, make)
                os.close(above)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise refusal(given, error) from None
        return fd

    def _check(self, fd: int, place: Place) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{shown(place.given)} is not a regular file")
        if found.st_nlink > 1 and not self.open_paths:
            inside = self.count_names(found)[found.st_dev, found.st_ino]
            if inside < found.st_nlink:
                raise Refused(
                    f"{shown(place.given)} has {found.st_nlink} names (hard links), of which {inside} were found in the "
                    "workspace: make a copy of it (cp) and use that"
                )

    def count_names(self, only: os.stat_result | None = None) -> Counter[tuple[int, int]]:
        """How many names (hard links) each file has in the workspace, (device, inode) → count, or those of one file."""
        count: Counter[tuple[int, int]] = Counter()
        for entry in itertools.islice(self._entries(), LINKS_LOOKED_AT):
            if only is None or entry.inode() == only.st_ino:
                found = entry.stat(follow_symlinks=False)
                count[found.st_dev, found.st_ino] += 1
        return count

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        pending = [self.root]
        while pending:
            try:
                with os.scandir(pending.pop()) as entries:
                    for entry in entries:
                        yield entry
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
            except OSError:
                continue  # not ours to read, or gone: what it holds does not count
