"""The installer's parts that need neither root nor a network; what apt does is tried by `make`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
INSTALL, UNPIN = SCRIPTS / "install_apptainer.sh", SCRIPTS / "glibc_unpin.py"
needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: no ELF file can be made to try on"
)

# A stand-in for a newer C library, to link against: only names and versions, never loaded.
NEW_LIBC = "long __isoc23_strtol(void) { return 0; } int only_new(void) { return 0; } int abs(int x) { return x; }"
VERSIONS = "GLIBC_2.2.5 { global: abs; local: *; }; GLIBC_2.38 { global: __isoc23_strtol; only_new; };"
USER = """long __isoc23_strtol(const char *, char **, int); int abs(int); int only_new(void);
long parse(const char *text) { return abs(__isoc23_strtol(text, 0, 10))%s; }"""


def build(directory: Path, extra: str = "") -> Path:
    """A library that wants __isoc23_strtol@GLIBC_2.38."""
    (directory / "new").mkdir()
    (directory / "tree").mkdir()
    for name, text in {"libc.c": NEW_LIBC, "libc.map": VERSIONS, "user.c": USER % extra}.items():
        (directory / name).write_text(text)
    stand_in, library = directory / "new" / "libc.so.6", directory / "tree" / "user.so"
    gcc = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-nostdlib", "-o"]
    script = f"-Wl,--version-script={directory / 'libc.map'}"
    subprocess.run([*gcc, stand_in, directory / "libc.c", "-Wl,-soname,libc.so.6", script], check=True)
    subprocess.run([*gcc, library, directory / "user.c", stand_in], check=True)
    return library


def unpin(tree: Path) -> subprocess.CompletedProcess[str]:
    """As on a machine whose glibc is 2.36, whatever this one's is."""
    code = (
        f"import platform, runpy, sys; platform.libc_ver = lambda: ('glibc', '2.36'); sys.argv = ['x', {str(tree)!r}]"
    )
    code += f"; runpy.run_path({str(UNPIN)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@needs_gcc
def test_a_library_is_freed_and_works(tmp_path: Path) -> None:
    library = build(tmp_path)
    (tmp_path / "tree" / "notes.txt").write_text("not an ELF file")
    (tmp_path / "tree" / "link.so").symlink_to("user.so")
    done = unpin(tmp_path / "tree")
    assert (done.returncode, done.stderr) == (0, "") and "__isoc23_strtol -> plain names" in done.stdout
    assert ctypes.CDLL(str(library)).parse(b"-42") == 42
    again = unpin(tmp_path / "tree")
    assert (again.returncode, again.stdout) == (0, "")


@needs_gcc
def test_what_wants_more_is_refused_and_left_alone(tmp_path: Path) -> None:
    library = build(tmp_path, " + only_new()")
    before = library.read_bytes()
    done = unpin(tmp_path / "tree")
    assert done.returncode == 1 and "only_new@GLIBC_2.38 has no older twin" in done.stderr
    assert library.read_bytes() == before


def run_installer(directory: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """With nothing on PATH but the basics and these programs."""
    for name in ("bash", "env", "dirname", "grep", "cat"):
        (directory / name).symlink_to(str(shutil.which(name)))
    for name, body in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
    return subprocess.run([INSTALL], env={"PATH": str(directory)}, capture_output=True, text=True, check=False)


def test_a_working_installation_is_left_alone(tmp_path: Path) -> None:
    done = run_installer(tmp_path, id="echo 1000", singularity='[ "$1" = buildcfg ] || echo singularity-ce 4')
    assert (done.returncode, done.stdout) == (0, "singularity-ce 4\n")


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({"id": "echo 1000", "apptainer": "exit 1"}, "needs root, or sudo without a password"),
        ({"id": "echo 1000", "sudo": "exit 1"}, "needs root, or sudo without a password"),
        ({"id": "echo 0"}, "this is no Debian or Ubuntu"),
    ],
)
def test_where_it_cannot_install_it_says_why(tmp_path: Path, programs: dict[str, str], reason: str) -> None:
    done = run_installer(tmp_path, **programs)
    assert done.returncode == 3 and reason in done.stderr.splitlines()[-1]


def test_shell_is_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", INSTALL], check=True)
