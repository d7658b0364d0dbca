"""What a kit holds: this Python and what it needs to run in any image, whatever that has or lacks.

    bin/python3 bash git      the node's, started as `ld.so --library-path lib bin/NAME`
    lib/                      their shared libraries, libc included
    lib/python3.X/            the standard library (lib64/ where this Python has it there)
    site/                     ptyprocess, the IPython kernel, and what these import
    ld.so                     the loader that fits that libc
    python3                   what the Python here takes itself for: starts it anew, where the image has a /bin/sh

Everything is copied from this node by what the files themselves say they need (the ELF interpreter, the loader's own
list of libraries, the distributions' RECORDs), so it does not matter who built this Python.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from prorl_hpc.messages.errors import SandboxError

SEEDS = ("ipykernel", "jupyter_client", "ptyprocess")
LEFT_OUT = frozenset({"debugpy"})
"""A debugger nobody attaches, and a fifth of the size; ipykernel does without."""
PROGRAMS = ("bash", "git")
INSIDE = "/.prorl/kit"
"""Where the kit appears in a sandbox."""
# fmt: off
_NOT_OF_THE_LIBRARY = (
    "__pycache__", "test", "tests", "idlelib", "tkinter", "_tkinter*", "turtle*", "ensurepip", "lib2to3",
    "config-*", "site-packages", "dist-packages", "_test*", "_ctypes_test*", "*.a", "*.exe", "pydoc_data",
)
# fmt: on
_NOT_OF_PACKAGES = {"..", "tests", "test", "__pycache__", "third_party"}
"""``..``: scripts; ``third_party``: jedi's 2,000 stubs for completing code as one types."""
_BESIDE_LIBC = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2", "libgcc_s.so.1", "libpthread.so.0")
"""Loaded by libc by name, so no list of libraries has them."""
_PT_INTERP = 3
_STARTER = f"""#!/bin/sh
exec {INSIDE}/ld.so --library-path {INSIDE}/lib {INSIDE}/bin/python3 "$@"
"""
_SITECUSTOMIZE = f"""# bin/python3 cannot be executed as it is: subprocess and multiprocessing start this instead.
import sys

sys.executable = sys._base_executable = "{INSIDE}/python3"
"""


def distributions() -> dict[str, metadata.Distribution]:
    """What the kit's Python can import beside the standard library, by normalized name."""
    found: dict[str, metadata.Distribution] = {}
    pending = [(seed, frozenset[str]()) for seed in SEEDS]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        wanted = pending.pop()
        name, extras = wanted
        if wanted in seen or name in LEFT_OUT:
            continue
        seen.add(wanted)
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise SandboxError(
                f"the Python package {name} is missing, which ipykernel needs in every sandbox: install it beside prorl_hpc "
                f"(`{sys.executable} -m pip install {name}`)"
            ) from None
        for text in found[name].requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                pending.append((re.sub(r"[-_.]+", "-", needed.name).lower(), frozenset(needed.extras)))
    return found


@dataclass(frozen=True)
class Programs:
    """Of this node: the interpreter, and those of PROGRAMS that it has."""

    python: Path
    others: dict[str, Path]

    @classmethod
    def of_this_node(cls) -> Programs:
        found = {name: Path(path).resolve() for name in PROGRAMS if (path := shutil.which(name))}
        if "bash" not in found:
            raise SandboxError("this node has no bash on PATH, which every sandbox needs: install it")
        return cls(Path(sys.executable).resolve(), found)


def fill(kit: Path, programs: Programs, packages: dict[str, metadata.Distribution]) -> None:
    """Build a kit in the empty directory ``kit``."""
    for name in ("bin", "lib", "site"):
        (kit / name).mkdir()
    shutil.copy(programs.python, kit / "bin" / "python3")
    for name, path in programs.others.items():
        shutil.copy(path, kit / "bin" / name)
    libraries = _standard_library(kit)
    for package in packages.values():
        libraries += _copy_package(package, kit / "site")
    loader = elf_interpreter(programs.python)
    shutil.copy(loader, kit / "ld.so")
    (kit / "python3").write_text(_STARTER)
    (kit / "python3").chmod(0o755)
    # bash first: where this Python comes with libraries of its own (conda), bash and it share a few by name, and bash
    # complains on every start about another's.
    _copy_libraries(kit, loader, [programs.others["bash"], programs.python, *libraries, *programs.others.values()])
    _compile(kit)


def _standard_library(kit: Path) -> list[Path]:
    """Copies it; returns the extension modules at their origin."""
    name = Path(sys.platlibdir) / f"python{sys.version_info.major}.{sys.version_info.minor}"
    source = Path(sysconfig.get_path("stdlib"))
    target = kit / name
    shutil.copytree(
        source,
        target,
        ignore=shutil.ignore_patterns(*_NOT_OF_THE_LIBRARY),
        ignore_dangling_symlinks=True,
        dirs_exist_ok=True,
    )
    (target / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    return [source / path.relative_to(target) for path in (target / "lib-dynload").glob("*.so")]


def _copy_package(package: metadata.Distribution, site: Path) -> list[Path]:
    """Copies its modules; returns the extension modules at their origin."""
    extensions = []
    for relative, path in _files(package):
        target = site / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        if ".so" in path.suffixes:
            extensions.append(path)
    return extensions


def _files(package: metadata.Distribution) -> Iterator[tuple[Path, Path]]:
    """(place below site-packages, origin) of its files, without tests and scripts."""
    listed = package.files
    if listed is None:
        yield from _files_of_modules(package)
        return
    for file in listed:
        origin = Path(str(package.locate_file(file)))
        if not _NOT_OF_PACKAGES & set(file.parts) and origin.is_file():
            yield Path(file), origin


def _files_of_modules(package: metadata.Distribution) -> Iterator[tuple[Path, Path]]:
    """For packages of a Linux distribution, which come without a RECORD: all of the modules that they name."""
    names = (package.read_text("top_level.txt") or package.metadata["Name"].replace("-", "_")).split()
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        if not spec.submodule_search_locations:
            yield Path(origin.name), origin
            continue
        for path in origin.parent.rglob("*"):
            relative = path.relative_to(origin.parent.parent)
            if path.is_file() and not _NOT_OF_PACKAGES & set(relative.parts):
                yield relative, path


def _copy_libraries(kit: Path, loader: Path, binaries: list[Path]) -> None:
    """The shared libraries that the loader finds for ``binaries``, but those that come with a package."""
    found: dict[str, Path] = {}
    for binary in dict.fromkeys(binaries):
        for name, path in _needed(loader, binary).items():
            found.setdefault(name, path)
    for libc in [path for name, path in found.items() if name.startswith("libc.so")]:
        beside = {name: libc.parent / name for name in _BESIDE_LIBC}
        found = {**{name: path for name, path in beside.items() if path.is_file()}, **found}
    vendored = {path.name for path in (kit / "site").rglob("*.so*")}
    for name, path in found.items():
        if name not in vendored and not name.startswith("ld-linux"):
            shutil.copy(path, kit / "lib" / name)


def _needed(loader: Path, binary: Path) -> dict[str, Path]:
    """soname → file, as the loader resolves them here. SandboxError when one is missing."""
    argv = [str(loader), "--list", str(binary)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C"})
    if result.returncode != 0 or "not found" in result.stdout:
        lines = [line.strip() for line in result.stdout.splitlines() if "not found" in line]
        raise SandboxError(f"{binary} does not load on this node: {'; '.join(lines) or result.stderr.strip()}")
    return {name: Path(path) for name, path in re.findall(r"^\s*(\S+) => (/.+?) \(0x", result.stdout, re.MULTILINE)}


def elf_interpreter(binary: Path) -> Path:
    """The loader that ``binary`` names. SandboxError when it is no ELF file, or is linked statically."""
    with binary.open("rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF":
            raise SandboxError(f"{binary} is not a program of this kind of machine (ELF)")
        order = "<" if head[5] == 1 else ">"
        wide = head[4] == 2
        (table,) = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", head, 32 if wide else 28)
        size, count = struct.unpack_from(f"{order}HH", head, 54 if wide else 42)
        for number in range(count):
            file.seek(table + number * size)
            entry = file.read(size)
            if struct.unpack_from(f"{order}I", entry)[0] == _PT_INTERP:
                offset, length = struct.unpack_from(f"{order}{'Q24xQ' if wide else 'I8xI'}", entry, 8 if wide else 4)
                file.seek(offset)
                return Path(os.fsdecode(file.read(length).rstrip(b"\0")))
    raise SandboxError(f"{binary} is linked statically: use a Python that loads shared libraries")


def _compile(kit: Path) -> None:
    """Unchecked: the kit never changes, and its copies need not keep times. In a process of its own: it takes seconds."""
    argv = [sys.executable, "-I", "-m", "compileall", "-q", "-q", "--invalidation-mode", "unchecked-hash", "-j", "2"]
    argv += ["-s", str(kit), "-p", INSIDE, str(kit / sys.platlibdir), str(kit / "site")]
    subprocess.run(argv, check=False, timeout=600)  # what does not compile (templates in packages) is never imported
