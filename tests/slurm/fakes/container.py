"""An image directory whose files are this machine's own: what a site's .sif would hold, without building one."""

from __future__ import annotations

import sys
from pathlib import Path

import prorl_hpc
from prorl_hpc.config.schema import ProrlConfig

FAKES = Path(__file__).resolve().parent.parent
_PLACES = "etc tmp proc sys dev root home var/tmp usr mnt run var/lib/apptainer/mnt/session etc/apptainer"


def make_image(path: Path) -> Path:
    for place in _PLACES.split():
        (path / place).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (path / name).symlink_to(f"usr/{name}")
    (path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (path / "etc/group").write_text("root:x:0:\n")
    for name in ("resolv.conf", "hosts", "localtime", "nsswitch.conf"):
        (path / "etc" / name).touch()
    return path


def in_container(config: ProrlConfig, image: Path) -> ProrlConfig:
    """``config`` with all components in ``image``, on this very Python."""
    package = Path(prorl_hpc.__file__).parent.parent
    binds = ["/usr:/usr:ro", "/etc/apptainer", sys.base_prefix, sys.prefix, str(package)]
    config.cluster.container.image = str(image)
    config.cluster.container.python = sys.executable
    config.cluster.container.args = [word for bind in binds for word in ("--bind", bind)]
    config.cluster.container.args += ["--env", f"PYTHONPATH={FAKES}"]
    config.sandbox.kind = "local"
    return config
