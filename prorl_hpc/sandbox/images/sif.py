"""The header of a SIF file: enough of it to know a damaged file, or one for another machine, before it is started.

Layout: Singularity Image Format, version 01 (github.com/apptainer/sif, pkg/sif): a global header of 128 bytes, then
descriptors of 585 bytes, one per data object.
"""

from __future__ import annotations

import platform
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prorl_hpc.messages.errors import SandboxError

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<i?III7q")  # type, used, id, group, link, offset, size, padded size, times, uid, gid
_DESCRIPTOR_SIZE = 585
_EXTRA_AT = _DESCRIPTOR.size + 128  # after a name of 128 bytes: file system, kind of partition, architecture
_EXTRA = struct.Struct("<ii3s")
_PARTITION, _PRIMARY = 0x4004, 2
_MOST_DESCRIPTORS = 4096  # real ones have about 48
_CURE = "pull or build it again (`prorl-hpc image verify` tells which others are damaged)"
_MAGIC = b"SIF_MAGIC\0"
_FILE_SYSTEMS = {1: "squashfs", 2: "ext3", 3: "archive", 4: "raw", 5: "encrypted squashfs"}
_ARCHITECTURES = dict(
    zip(
        (b"01", b"02", b"03", b"04", b"05", b"06", b"07", b"08", b"09", b"10", b"11", b"12"),
        (
            "386",
            "amd64",
            "arm",
            "arm64",
            "ppc64",
            "ppc64le",
            "mips",
            "mipsle",
            "mips64",
            "mips64le",
            "s390x",
            "riscv64",
        ),
        strict=True,
    )
)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}


@dataclass(frozen=True)
class Sif:
    """What a header says. ``architecture`` in Go's words: amd64, arm64, …"""

    architecture: str
    file_system: str
    size: int


def this_architecture() -> str:
    """Of this machine, in Go's words."""
    return _MACHINES.get(platform.machine(), platform.machine())


def check_sif(path: Path, architecture: str = "") -> Sif:
    """Read the header; with ``architecture`` (Go's words), the image must be for that one.

    Raises SandboxError that says what is wrong and what to do.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise SandboxError(f"image {path} is neither a file nor a sandbox directory")
        size = info.st_size
        with path.open("rb") as file:
            primary = _primary_partition(path, size, file)
            file.seek(primary.offset)
            superblock = file.read(96)
    except FileNotFoundError:
        raise SandboxError(f"image {path} does not exist on this node") from None
    except OSError as error:
        raise SandboxError(f"image {path} cannot be read: {error.strerror or error}") from error
    if primary.file_system == "squashfs":
        _check_squashfs(path, superblock, primary.size)
    if architecture and primary.architecture not in runs_on(architecture):
        raise SandboxError(
            f"image {path} is for {primary.architecture}, and this machine is {architecture}: pull or build it on a node "
            "of the kind that runs the sandboxes"
        )
    return Sif(primary.architecture, primary.file_system, size)


@dataclass(frozen=True)
class _Partition:
    architecture: str
    file_system: str
    offset: int
    size: int


def runs_on(architecture: str) -> tuple[str, ...]:
    """The architectures of images that a machine of ``architecture`` can run."""
    return (architecture, "386") if architecture == "amd64" else (architecture,)


def _primary_partition(path: Path, size: int, file: BinaryIO) -> _Partition:
    """Checks the places of all data objects against the file's size on the way."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[32:42] != _MAGIC:
        what = "is not a SIF file (its magic is missing)" if head.strip(b"\0") else "is empty"
        raise SandboxError(f"image {path} {what}: {_CURE}")
    total, table = _HEADER.unpack(head)[8:10]
    file.seek(table)
    end, primary = 0, None
    for _ in range(min(total, _MOST_DESCRIPTORS)):
        entry = file.read(_DESCRIPTOR_SIZE)
        if len(entry) < _DESCRIPTOR_SIZE:
            raise SandboxError(f"image {path} was cut short within its header ({size} bytes): {_CURE}")
        kind, used, _, _, _, offset, length, *_ = _DESCRIPTOR.unpack_from(entry)
        if used:
            end = max(end, offset + length)
            file_system, partition, machine = _EXTRA.unpack_from(entry, _EXTRA_AT)
            if (kind, partition) == (_PARTITION, _PRIMARY):
                architecture = _ARCHITECTURES.get(machine[:2], "an unknown architecture")
                primary = _Partition(architecture, _FILE_SYSTEMS.get(file_system, "unknown"), offset, length)
    if primary is None:
        raise SandboxError(f"image {path} holds no root file system: {_CURE}")
    if size < end:
        raise SandboxError(f"image {path} was cut short: it has {size} bytes, its header speaks of {end}: {_CURE}")
    return primary


def _check_squashfs(path: Path, superblock: bytes, partition_size: int) -> None:
    """It must name a file system that fits its partition; what is in it only a checksum can tell."""
    if superblock[:4] != b"hsqs" or int.from_bytes(superblock[40:48], "little") > partition_size:
        raise SandboxError(f"image {path} is damaged: its root file system has no sound superblock: {_CURE}")
