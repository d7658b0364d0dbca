"""The Apptainer (or Singularity) runtime: one directly attached ``apptainer exec`` child per sandbox.

No instances and no exec per call: an instance costs a daemon that nobody is attached to, and an exec costs 100 ms.
Everything of the host that the sandbox gets is named in ``_launch``: the workspace, /tmp, the socket's directory
and the tool server, and for the ``host`` image the node's /usr, read-only.
"""

from __future__ import annotations

import asyncio
import compileall
import os
import re
import shutil
from pathlib import Path

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.attached_runtime import CODE, SHELL_PATH, AttachedRuntime, Launch
from prorl_hpc.sandbox.container_binary import find_binary as find_binary
from prorl_hpc.sandbox.directories import MARKER, Box
from prorl_hpc.sandbox.host_image import make_host_image
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.sandbox.toolkit import ensure_kit

HOST_IMAGE = "host"
INSIDE = "/.prorl"
"""Where all of ours appears in the sandbox, read-only but for ``s``: code/ kit/ s/ sockets/."""
_FROM_HOST = ("LD_LIBRARY_PATH", "APPTAINER_TMPDIR", "APPTAINER_CACHEDIR", "SINGULARITY_TMPDIR", "SINGULARITY_CACHEDIR")
"""All that the launcher's environment keeps of ours; nothing of it reaches the sandbox's shell."""
_HINTS = (
    (
        r"user namespace|userns|CLONE_NEWUSER|clone: operation not permitted|max_user_namespaces",
        "this node does not let users make user namespaces: ask its administrator for `sysctl -w "
        "user.max_user_namespaces=15000` (on Debian also kernel.unprivileged_userns_clone=1, on Ubuntu 24.04 also "
        "kernel.apparmor_restrict_unprivileged_userns=0), or for a setuid installation of apptainer",
    ),
    (
        r"/dev/fuse|squashfuse|fusermount",
        "a .sif image needs FUSE: ask for /dev/fuse to be open to users and squashfuse to be installed, or unpack the "
        "image with `apptainer build --sandbox DIR IMAGE.sif` and name the directory",
    ),
    (r"network|CNI", "the node refuses `--net --network none`: ask its administrator to allow it to users"),
)


class ApptainerRuntime(AttachedRuntime):
    """Rootless containers, without network unless it is asked for."""

    def __init__(self, config: SandboxConfig, runtime_dir: Path) -> None:
        super().__init__(config, runtime_dir)
        self._binary = ""
        self._version = ""
        self._host_image = Path()
        self._host_binds: list[str] = []
        self._base = Path()
        self._kit = Path()

    @property
    def description(self) -> str:
        return self._version or "apptainer (not prepared)"

    async def _prepare(self, holding: Path) -> None:
        self._binary = find_binary()
        self._version = await _version(self._binary)
        self._kit = await asyncio.to_thread(ensure_kit, self._runtime_dir)
        self._base = holding / "base"
        await asyncio.to_thread(make_base, self._base)
        self._host_image = holding / "image"
        self._host_binds = await asyncio.to_thread(make_host_image, self._host_image)
        if self._config.image != HOST_IMAGE:
            check_image(self._config.image)

    def _launch(self, spec: SandboxSpec, box: Box) -> Launch:
        image = spec.image or self._config.image
        binds = [f"{box.workspace}:/workspace", f"{box.tmp}:/tmp", f"{self._base}:{INSIDE}:ro"]
        binds += [f"{self._kit}:{INSIDE}/kit:ro", f"{box.socket_dir}:{INSIDE}/s"]
        if image == HOST_IMAGE:
            image = str(self._host_image)
            binds += [f"{path}:{path}:ro" for path in self._host_binds]
        else:
            check_image(image)
        argv = [self._binary, "-q", "-s", "exec", *isolation_flags(self._network(spec))]
        for bind in binds:
            argv += ["--bind", bind]
        argv += [image, *server_argv(f"{INSIDE}/s/{box.socket.name}")]
        env = {"HOME": "/tmp", "LANG": "C.UTF-8", **spec.env}
        settings = self._settings("/workspace", f"{INSIDE}/s", env, inherit_env=True)
        return Launch(argv, launcher_environment(self._binary, box), settings)

    def _network(self, spec: SandboxSpec) -> str:
        return spec.network or self._config.network

    def _explain(self, reason: str) -> str:
        for pattern, hint in _HINTS:
            if re.search(pattern, reason, re.IGNORECASE):
                return f"{reason}\n{hint}"
        return reason


def make_base(base: Path) -> None:
    """The directory that becomes /.prorl: mount points, and a copy of the tools' code, which is then compiled and
    readable whatever the package's own directory is like."""
    for name in ("kit", "s", "sockets"):
        (base / name).mkdir(parents=True)
    code = base / "code" / CODE.relative_to(CODE.parents[2])
    shutil.copytree(CODE, code, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(code, quiet=2, stripdir=str(base), prependdir=INSIDE)


def server_argv(socket: str) -> list[str]:
    """The tool server's command line in the sandbox: on the kit's Python, whatever the image has."""
    kit = f"{INSIDE}/kit"
    python = [f"{kit}/ld.so", "--library-path", f"{kit}/lib", f"{kit}/bin/python3", "-I", "-S"]
    return [*python, f"{INSIDE}/code/prorl_hpc/sandbox/tools/start.py", f"{kit}/site", kit, socket]


def isolation_flags(network: str) -> list[str]:
    """What every sandbox is started with. ``--pwd`` is known to old and new versions."""
    flags = ["--containall", "--cleanenv", "--no-home", "--no-init", "--no-mount", "hostfs,sys", "--pwd", "/workspace"]
    if network == "none":
        flags += ["--net", "--network", "none"]
    if os.getuid() == 0:
        flags.append("--userns")  # the same path as everybody else's, and root's powers stay outside
    return flags


def launcher_environment(binary: str, box: Box) -> dict[str, str]:
    """For the apptainer process itself. An allow list: the launcher's environment can be read in the sandbox."""
    env = {name: os.environ[name] for name in _FROM_HOST if name in os.environ}
    path = f"{Path(binary).parent}:{SHELL_PATH}"
    return {**env, "PATH": path, "HOME": str(box.path), "LANG": "C.UTF-8", MARKER: str(box.path)}


def check_image(image: str) -> None:
    """Raises SandboxError for an image that is not there."""
    path = Path(image)
    if "://" in image:
        raise SandboxError(
            f"image {image!r} is not on this node: build it first (`apptainer build NAME.sif {image}`) and name the file"
        )
    if path.is_dir() and not (path / ".singularity.d").exists():
        raise SandboxError(f"image {path} is a directory but not an apptainer sandbox: it has no .singularity.d")
    if not path.exists():
        raise SandboxError(
            f"image {path} does not exist on this node: sandbox.image takes a .sif file, a sandbox directory or {HOST_IMAGE!r}"
        )


async def _version(binary: str) -> str:
    process = await asyncio.create_subprocess_exec(
        binary,
        "--version",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(20):
            output = (await process.communicate())[0].decode(errors="replace").strip()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise SandboxError(f"`{binary} --version` gave no answer within 20 s") from None
    if process.returncode != 0:
        raise SandboxError(f"`{binary} --version` ended with exit code {process.returncode}: {output}")
    return output.replace(" version ", " ")
