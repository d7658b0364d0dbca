"""The ``host`` image: a directory with nothing in it but links, which borrows the node's own /usr, read-only.

Made in milliseconds, owned by the user (which a user's mounts need), with the node's python3, bash and git.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_DIRECTORIES = "dev etc home mnt opt proc root run srv sys tmp usr var/tmp workspace .prorl .singularity.d/env"
_ACTIONS = {
    "exec": '#!/bin/sh\nfor s in /.singularity.d/env/*.sh; do [ -f "$s" ] && . "$s"; done\nexec "$@"\n',
    "run": '#!/bin/sh\nexec /bin/sh "$@"\n',
    "shell": '#!/bin/sh\nexec /bin/sh "$@"\n',
}
_ENVIRONMENT = "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LD_LIBRARY_PATH=\n"


def make_host_image(path: Path, root: Path = Path("/")) -> list[str]:
    """Make the directory at ``path``; returns the host directories that have to be bound into it read-only."""
    for name in _DIRECTORIES.split():
        (path / name).mkdir(parents=True)
    binds = ["/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        source = root / name
        if source.is_symlink():
            (path / name).symlink_to(source.readlink())
        elif source.is_dir():  # a distribution without merged /usr
            (path / name).mkdir()
            binds.append(f"/{name}")
    _write_etc(path / "etc", root / "etc")
    actions = path / ".singularity.d" / "actions"
    actions.mkdir()
    for name, text in _ACTIONS.items():
        (actions / name).write_text(text)
        (actions / name).chmod(0o755)
    (path / ".singularity.d" / "env" / "01-base.sh").write_text(_ENVIRONMENT)
    return binds


def _write_etc(etc: Path, source: Path) -> None:
    """Only what programs need to start: nothing that tells of the node or its users."""
    (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (etc / "group").write_text("root:x:0:\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    for name in ("hosts", "resolv.conf", "localtime"):
        (etc / name).touch()
    if (source / "ld.so.cache").is_file():
        shutil.copy(source / "ld.so.cache", etc)
    if (source / "alternatives").is_dir():
        shutil.copytree(source / "alternatives", etc / "alternatives", symlinks=True)
