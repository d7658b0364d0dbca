"""The kit: built once, noticed when it is broken, and all that our tools need runs from it."""

from __future__ import annotations

import os
import subprocess
import threading
from importlib import metadata
from pathlib import Path

import pytest

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox import toolkit
from prorl_hpc.sandbox.file_systems import is_network, type_of
from prorl_hpc.sandbox.toolkit import ensure_kit, is_whole, kit_key, place
from prorl_hpc.sandbox.toolkit_build import Programs, distributions, elf_interpreter


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kit")
    return ensure_kit(directory / "runtime", directory / "home")


def in_kit(kit: Path, program: str, *arguments: str) -> str:
    argv = [kit / "ld.so", "--library-path", kit / "lib", kit / "bin" / program, *arguments]
    result = subprocess.run(argv, env={}, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result
    return result.stdout


def test_its_python_needs_nothing_of_the_node(kit: Path) -> None:
    program = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import ipykernel.kernelapp, jupyter_client, ptyprocess, zmq, ssl, sqlite3, ctypes\n"
        "print(*{m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)}, sep='\\n')\n"
        "print(*(line.split(maxsplit=5)[5].strip() for line in open('/proc/self/maps') if '.so' in line), sep='\\n')\n"
        "assert 'debugpy' not in sys.modules"
    )
    files = in_kit(kit, "python3", "-I", "-S", "-c", program, str(kit / "site")).split()
    assert len(files) > 200 and [name for name in files if not name.startswith(f"{kit}/")] == []


def test_its_bash_and_git_run(kit: Path) -> None:
    assert in_kit(kit, "bash", "-c", "echo $((6 * 7))") == "42\n"
    assert in_kit(kit, "git", "--version").startswith("git version")


def test_it_is_built_once_and_stays(kit: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert ensure_kit(kit.parents[1], kit.parents[1]) == kit
    assert "making" not in caplog.text


def test_a_kit_that_lost_something_is_not_whole(tmp_path: Path) -> None:
    made = []

    def make(new: Path) -> None:
        made.append(new)
        (new / "lib").mkdir()
        (new / "lib" / "libc").write_text("whole")

    target = tmp_path / "k"
    for number, damage in enumerate((lambda: None, (target / "lib" / "libc").unlink, (target / "complete").unlink)):
        damage()
        place(target, "a kit", make)
        assert is_whole(target) and len(made) == max(1, number + 1)
    (target / "lib" / "libc").write_text("")
    place(target, "a kit", make)
    assert (target / "lib" / "libc").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k", "k.lock"]


def test_two_at_once_are_one_build(tmp_path: Path) -> None:
    made = []

    def make(new: Path) -> None:
        made.append(new)
        threading.Event().wait(0.2)
        (new / "file").touch()

    threads = [threading.Thread(target=place, args=(tmp_path / "k", "a kit", make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1 and is_whole(tmp_path / "k")


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(new: Path) -> None:
        (new / "half").touch()
        raise SandboxError("no luck")

    with pytest.raises(SandboxError, match="no luck"):
        place(tmp_path / "k", "a kit", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]


def test_what_a_killed_builder_left_goes_with_the_next_build(tmp_path: Path) -> None:
    old, young, others = (tmp_path / name for name in (".k-old", ".k-young", ".other-old"))
    for path in (old, young, others):
        (path / "lib").mkdir(parents=True)
    for path in (old, others):
        os.utime(path, (1e9, 1e9))
    place(tmp_path / "k", "a kit", lambda new: (new / "file").touch())
    assert not old.exists() and young.is_dir() and others.is_dir()


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(SandboxError, match="PRORL_HOME chooses another place"):
        ensure_kit(tmp_path, tmp_path / "home")


def test_on_a_network_file_system_each_node_has_a_copy(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit, "is_network", lambda path: True)
    copy = ensure_kit(tmp_path, kit.parents[1])
    assert copy.parent == tmp_path and is_whole(copy)
    assert in_kit(copy, "python3", "-I", "-S", "-c", "print(1)") == "1\n"


def test_the_key_tells_software_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    programs, packages = Programs.of_this_node(), distributions()
    assert {"ipykernel", "jupyter-client", "ptyprocess", "pyzmq", "ipython"} <= set(
        packages
    ) and "debugpy" not in packages
    key = kit_key(programs, packages)
    assert kit_key(programs, dict(reversed(packages.items()))) == key
    fewer = {name: package for name, package in packages.items() if name != "pyzmq"}
    assert kit_key(programs, fewer) != key
    monkeypatch.setattr(toolkit, "BUILDER", toolkit.BUILDER + 1)
    assert kit_key(programs, packages) != key


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("prorl_hpc.sandbox.toolkit_build.metadata.distribution", missing)
    with pytest.raises(SandboxError, match=r"ptyprocess is missing.*-m pip install ptyprocess"):
        distributions()


def test_what_is_no_program_is_told(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")
    with pytest.raises(SandboxError, match="not a program"):
        elf_interpreter(tmp_path / "script")


def test_file_systems_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Mounted:
        def __init__(self, mountpoint: Path, fstype: str) -> None:
            self.mountpoint, self.fstype = str(mountpoint), fstype

    there = [Mounted(Path("/"), "ext4"), Mounted(tmp_path, "lustre"), Mounted(tmp_path / "local", "xfs")]
    monkeypatch.setattr("prorl_hpc.sandbox.file_systems.psutil.disk_partitions", lambda all: there)
    assert type_of(tmp_path / "not" / "yet") == "lustre" and is_network(tmp_path / "not" / "yet")
    assert not is_network(tmp_path / "local" / "x") and not is_network(Path("/"))
