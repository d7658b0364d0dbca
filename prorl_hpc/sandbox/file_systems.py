"""What kind of file system a path is on: what lies on a shared one is copied once per node before many start from it."""

from __future__ import annotations

from pathlib import Path

import psutil

# fmt: off
NETWORK_TYPES = frozenset((
    "9p", "afs", "autofs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.ceph-fuse", "fuse.cvmfs",
    "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs3",
    "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
))
# fmt: on


def type_of(path: Path) -> str:
    """The type of the file system that holds ``path`` (``ext4``, ``nfs4``, …), existing or not yet; empty where the
    kernel does not tell."""
    resolved = path.resolve()
    kinds: dict[Path, str] = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    for parent in (resolved, *resolved.parents):
        if parent in kinds:
            return kinds[parent]
    return ""


def is_network(path: Path) -> bool:
    """Whether ``path`` is on a network file system, where every start would read it from afar."""
    return type_of(path).lower() in NETWORK_TYPES
