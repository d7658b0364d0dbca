"""A file's new content in place of the old: all of it or nothing, with its mode, owner, names and attributes kept."""

from __future__ import annotations

import errno
import os
import stat

from prorl_hpc.sandbox.tools.toolset import Refused
from prorl_hpc.sandbox.tools.workspace import Place, Workspace, refusal, shown

_NOT_BY_RENAME = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""A directory that cannot be written may hold a file that can, and a mounted file cannot be renamed over."""
_OF_EVERY_FILE = {"security.selinux"}
"""Attributes that the system gives to a new file as well."""


def rewrite(workspace: Workspace, place: Place, fd: int, found: os.stat_result, old: bytes, new: bytes) -> None:
    """``fd`` is open for writing; ``found`` is its state before ``old`` was read from it. Refused, with the file as it
    was, where it fails or where something else changed the file since."""
    if found.st_nlink == 1 and not _attributes(fd) and _by_rename(workspace, place, found, new):
        return
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        workspace.write(fd, new, place.given)
        os.ftruncate(fd, len(new))
    except BaseException:
        os.pwrite(fd, old, 0)
        os.ftruncate(fd, len(old))
        raise


def _by_rename(workspace: Workspace, place: Place, found: os.stat_result, new: bytes) -> bool:
    """False where a new file would not be quite the same; nothing was done then."""
    name = f".prorl-{os.getpid()}-{os.urandom(4).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600, dir_fd=place.directory)
    except OSError as error:
        if error.errno in _NOT_BY_RENAME:
            return False
        raise refusal(place.given, error) from None
    try:
        made = os.fstat(fd)
        if (made.st_uid, made.st_gid) != (found.st_uid, found.st_gid):
            os.fchown(fd, found.st_uid, found.st_gid)
        os.fchmod(fd, stat.S_IMODE(found.st_mode))
        workspace.write(fd, new, place.given)
        now = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (found.st_ino, found.st_size, found.st_mtime_ns):
            raise Refused(f"{shown(place.given)} was changed by something else just now: view it and try again")
        os.rename(name, place.name, src_dir_fd=place.directory, dst_dir_fd=place.directory)
    except OSError as error:
        os.unlink(name, dir_fd=place.directory)
        if error.errno in _NOT_BY_RENAME:
            return False
        raise refusal(place.given, error) from None
    except BaseException:
        os.unlink(name, dir_fd=place.directory)
        raise
    finally:
        os.close(fd)
    return True


def _attributes(fd: int) -> set[str]:
    try:
        return set(os.listxattr(fd)) - _OF_EVERY_FILE
    except OSError:
        return set()  # a file system without them
