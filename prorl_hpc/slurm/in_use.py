"""What processes of this user have in use on this machine: files, and Unix sockets that somebody listens on.

Nobody is connected to for it: some servers take one connection and no second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class InUse:
    """Open, mapped and working files by path and by (device, inode), for a container sees other paths; the sockets'
    names without their directories, for the same reason."""

    paths: set[str] = field(default_factory=set)
    inodes: set[tuple[int, int]] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)

    @classmethod
    def now(cls) -> InUse:
        found, networks = cls(), set[int]()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if process.stat().st_uid == os.getuid():
                    found._add(process, networks)
            except OSError:  # it ended meanwhile, or is not ours to look at
                continue
        return found

    def user_of(self, path: Path) -> str:
        """What is in use of the path or below it, for people; empty if nothing is."""
        prefix = f"{path}/"
        if used := next((name for name in self.paths if name == str(path) or name.startswith(prefix)), ""):
            return f"a process has {used} open"
        for file in [path, *path.rglob("*")]:
            try:
                info = file.lstat()
            except FileNotFoundError:
                continue
            if (info.st_dev, info.st_ino) in self.inodes:
                return f"a process has {file} open"
            if file.is_socket() and file.name in self.sockets:
                return f"somebody listens on a socket called {file.name}"
        return ""

    def _add(self, process: Path, networks: set[int]) -> None:
        for link in [process / "cwd", process / "root", *(process / "fd").iterdir()]:
            try:
                info = link.stat()
                self.inodes.add((info.st_dev, info.st_ino))
                self.paths.add(_named(str(link.readlink())))
            except OSError:
                continue
        self.paths.update(_mapped(process))
        network = (process / "ns" / "net").stat().st_ino
        if network not in networks:
            networks.add(network)
            self.sockets.update(_socket_names(process))


def _mapped(process: Path) -> Iterator[str]:
    for line in (process / "maps").read_text().splitlines():
        if (start := line.find("/")) > 0:
            yield _named(line[start:])


def _socket_names(process: Path) -> Iterator[str]:
    """Names of all bound sockets of the process's network: the eighth column, where there is one."""
    for line in (process / "net" / "unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            yield Path(fields[7]).name


def _named(path: str) -> str:
    return path.removesuffix(" (deleted)")
