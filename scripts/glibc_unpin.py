#!/usr/bin/env python3
"""Let programs built on glibc >= 2.38 load on an older glibc, where nothing but C23's names of strtol stands in the way.

    glibc_unpin.py DIRECTORY      every ELF file below it that this machine's glibc is too old for

A compiler on glibc 2.38 turns strtol() into __isoc23_strtol@GLIBC_2.38, which differs from strtol@GLIBC_2.2.5 only
in that it reads "0b101". Where such names are all that a file wants of the new version, each symbol is pointed at
the old name, which is the tail of the new one's string, and the version record at the old version. A dozen bytes
change, no offset moves; a file that wants anything else is refused and left as it was.

Formats: System V gABI (ELF-64), and Linux Standard Base, "Symbol Versioning".
"""

from __future__ import annotations

import platform
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

NEW, OLD, PREFIX = "GLIBC_2.38", "GLIBC_2.2.5", "__isoc23_"
_SYMBOL_BYTES = 24


class Refused(Exception):
    """The file cannot be freed; it was not changed."""


def elf_hash(name: str) -> int:
    """The hash that version records carry."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


class Elf:
    """A little-endian ELF-64 file in memory, with the sections that dynamic linking is about."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise Refused(f"{path} is not a little-endian ELF-64 file")
        (table,) = struct.unpack_from("<Q", self.data, 40)
        entry_bytes, count, names_index = struct.unpack_from("<HHH", self.data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + i * entry_bytes) for i in range(count)]
        names_at = headers[names_index][4] if headers else 0
        # name → (file offset, size, info)
        self.sections = {self._text(names_at + h[0]): (h[4], h[5], h[7]) for h in headers}

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    @property
    def strings_at(self) -> int:
        offset: int = self.sections[".dynstr"][0]
        return offset

    def versions(self) -> Iterator[tuple[int, int, str]]:
        """(offset of the record, its index, its name) of every version wanted (Vernaux)."""
        if ".gnu.version_r" not in self.sections:
            return
        position, _, count = self.sections[".gnu.version_r"]
        for _ in range(count):
            _, records, _, first, following = struct.unpack_from("<HHIII", self.data, position)
            record = position + first
            for _ in range(records):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, record)
                yield record, index, self._text(self.strings_at + name)
                record += step
            position += following

    def newest_glibc(self) -> tuple[int, ...]:
        found = (re.fullmatch(r"GLIBC_([0-9.]+)", name) for _, _, name in self.versions())
        return max((_version(match[1]) for match in found if match), default=(0,))

    def symbols(self, indices: set[int]) -> Iterator[tuple[int, str]]:
        """(offset, name) of the dynamic symbols bound to these versions."""
        start, size, _ = self.sections[".dynsym"]
        version_table = self.sections[".gnu.version"][0]
        for number in range(size // _SYMBOL_BYTES):
            (index,) = struct.unpack_from("<H", self.data, version_table + 2 * number)
            if index & 0x7FFF in indices:
                symbol = start + number * _SYMBOL_BYTES
                (name,) = struct.unpack_from("<I", self.data, symbol)
                yield symbol, self._text(self.strings_at + name)


def unpin(path: Path) -> list[str]:
    """Free one file; returns the names that were changed. Raises Refused."""
    elf = Elf(path)
    records = [(record, index) for record, index, name in elf.versions() if name == NEW]
    symbols = list(elf.symbols({index for _, index in records}))
    for _, name in symbols:
        if not name.startswith(PREFIX):
            raise Refused(f"{path}: {name}@{NEW} has no older twin")
    start, size, _ = elf.sections[".dynstr"]
    old_name = elf.data.find(b"\0" + OLD.encode() + b"\0", start, start + size)
    if records and old_name < 0:
        raise Refused(f"{path} names no {OLD} that the record could point at")
    for symbol, _ in symbols:
        (name_at,) = struct.unpack_from("<I", elf.data, symbol)
        struct.pack_into("<I", elf.data, symbol, name_at + len(PREFIX))
    for record, _ in records:
        struct.pack_into("<I", elf.data, record, elf_hash(OLD))
        struct.pack_into("<I", elf.data, record + 8, old_name + 1 - start)
    # In place: modes and hard links stay.
    with path.open("r+b") as file:
        file.write(elf.data)
    return [name for _, name in symbols]


def elf_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(6) == b"\x7fELF\x02\x01":
                    yield path


def unpin_tree(directory: Path, have: tuple[int, ...]) -> None:
    """Free every file below ``directory`` that wants a newer glibc than ``have``. Raises Refused."""
    for path in elf_files(directory):
        if Elf(path).newest_glibc() > have:
            print(f"{path}: {', '.join(unpin(path))} -> plain names, {OLD}")
        wanted = Elf(path).newest_glibc()
        if wanted > have:
            raise Refused(
                f"{path} needs glibc {'.'.join(map(str, wanted))}, this machine has {'.'.join(map(str, have))}"
            )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: glibc_unpin.py DIRECTORY", file=sys.stderr)
        return 2
    library, version = platform.libc_ver()
    try:
        if library != "glibc":
            raise Refused(f"this machine's C library is {library or 'unknown'}, not glibc")
        unpin_tree(Path(sys.argv[1]), _version(version))
    except Refused as refusal:
        print(f"glibc_unpin: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
