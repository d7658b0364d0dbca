"""Images that lack what others have, made in no time from what this machine has."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.toolkit_build import elf_interpreter

_DIRECTORIES = "dev etc proc root sys tmp usr/bin .singularity.d"


def _skeleton(path: Path) -> Path:
    for name in _DIRECTORIES.split():
        (path / name).mkdir(parents=True)
    (path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nagent:x:1234:1234::/home/agent:/bin/sh\n")
    return path


def empty_image(path: Path) -> Path:
    """Not a single program in it, nor a library."""
    return _skeleton(path)


def busybox_image(path: Path) -> Path:
    """sh, but neither bash nor Python nor a libc."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip(
            "busybox-static is not installed (scripts/setup.sh installs it): images without Python are not tested"
        )
    try:
        elf_interpreter(Path(busybox))
    except SandboxError:
        pass  # linked statically, as it must be
    else:
        pytest.skip(f"{busybox} needs shared libraries: install busybox-static to test images without Python")
    _skeleton(path)
    shutil.copy(busybox, path / "usr" / "bin" / "busybox")
    for name in ("sh", "ls", "cat", "env", "id", "sleep", "rm", "mkdir", "head", "stat", "mount", "grep"):
        (path / "usr" / "bin" / name).symlink_to("busybox")
    (path / "bin").symlink_to("usr/bin")
    return path


def broken_libc_image(path: Path) -> Path:
    """With a Python, a git and a libc that nothing of ours may touch: as far as we can tell, too old."""
    _skeleton(path)
    loader = elf_interpreter(Path(shutil.which("bash") or "/bin/bash").resolve())
    for place in ("lib", "lib64", "usr/lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", str(loader.parent)[1:]):
        (path / place).mkdir(parents=True, exist_ok=True)
        for name in ("libc.so.6", "libm.so.6", "libtinfo.so.6", "libpython3.11.so.1.0", loader.name):
            (path / place / name).write_text("from another time\n")
    for name in ("python3", "sh", "git", "bash"):
        (path / "usr" / "bin" / name).write_bytes(b"\x7fELF from another time")
        (path / "usr" / "bin" / name).chmod(0o755)
    (path / "bin").symlink_to("usr/bin")
    if Path("/etc/ld.so.cache").exists():
        shutil.copy("/etc/ld.so.cache", path / "etc")
    return path


def image_whose_bash_ends_at_once(path: Path) -> Path:
    bash = busybox_image(path) / "usr" / "bin" / "bash"
    bash.write_text("#!/bin/sh\necho bash: some library has no version GLIBC_9.9 >&2; exit 1\n")
    bash.chmod(0o755)
    return path


def image_with_a_user(path: Path) -> Path:
    """A .sif made from a Docker archive whose USER is not root."""
    root = busybox_image(path.with_name("layer"))
    (root / "home" / "agent").mkdir(parents=True)
    shutil.rmtree(root / ".singularity.d")
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add(root, arcname=".")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin", "FROM_IMAGE=yes"], "User": "agent", "WorkingDir": "/home/agent"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["odd:latest"], "Layers": ["layer.tar"]}]
    tar = path.with_suffix(".tar")
    with tarfile.open(tar, "w") as archive:
        for name, content in (
            ("layer.tar", layer.getvalue()),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return _built(path.with_suffix(".sif"), f"docker-archive:{tar}")


def sif_of(path: Path, directory: Path) -> Path:
    return _built(path.with_suffix(".sif"), str(directory))


def _built(sif: Path, source: str) -> Path:
    argv = [find_binary(), "-q", "build", str(sif), source]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode != 0:
        pytest.skip(f"no image can be built on this machine: {result.stderr.strip()}")
    return sif
