"""The Apptainer (or Singularity) runtime: one directly attached ``apptainer exec`` child per sandbox.

Neither instances nor an exec per call, by hand or through spython: an instance takes twice as long to start, runs a
daemon that nobody is attached to and an init that shows the node's paths, and every exec into it costs 100 ms, where a
message to the tool server costs less than one; spython adds a ``--version`` to each call, has no time limits and no
stdin, and only logs an instance that did not start or stop. (It does build and inspect images: images/.)

Everything of the node that the sandbox gets is named in ``_launch``: the workspace, /tmp, the kit, the tool server and
its socket's directory, the sockets and directories that its task asks for, and for the ``host`` image the node's /usr, read-only.
"""

from __future__ import annotations

import asyncio
import compileall
import os
import shutil
from pathlib import Path

from prorl_hpc.config.schema import SandboxConfig
from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.apptainer_reasons import explained
from prorl_hpc.sandbox.attached_runtime import CODE, SHELL_PATH, AttachedRuntime, Launch, socket_environment
from prorl_hpc.sandbox.container_binary import find_binary
from prorl_hpc.sandbox.directories import MARKER, Box
from prorl_hpc.sandbox.host_image import make_host_image
from prorl_hpc.sandbox.images.node_copy import NodeImages, sweep_copies
from prorl_hpc.sandbox.images.resolving import HOST_IMAGE
from prorl_hpc.sandbox.protocol import SandboxSpec
from prorl_hpc.sandbox.toolkit import ensure_kit

INSIDE = "/.prorl"
"""Where all of ours appears in the sandbox, read-only but for ``s``: code/ kit/ s/ sockets/."""
_HOSTNAME = "sandbox"
_HOSTS = f"127.0.0.1 localhost {_HOSTNAME}\n::1 localhost\n"
_FROM_HOST = ("LD_LIBRARY_PATH", "APPTAINER_TMPDIR", "APPTAINER_CACHEDIR", "SINGULARITY_TMPDIR", "SINGULARITY_CACHEDIR")
"""All that the launcher's environment keeps of ours; nothing of it reaches the sandbox's shell."""


class ApptainerRuntime(AttachedRuntime):
    """Rootless containers, without network unless it is asked for."""

    def __init__(self, config: SandboxConfig, runtime_dir: Path) -> None:
        super().__init__(config, runtime_dir)
        self._binary = ""
        self._version = ""
        self._images = NodeImages(config, self._runtime_dir)
        self._host_image = Path()
        self._host_binds: list[str] = []
        self._base = Path()
        self._kit = Path()

    @property
    def description(self) -> str:
        return self._version or "apptainer (not prepared)"

    async def _prepare(self, holding: Path) -> None:
        check_bind(self._runtime_dir, "run.runtime_root chooses another place")
        self._binary = find_binary()
        self._version = await _version(self._binary)
        self._kit = await asyncio.to_thread(ensure_kit, self._runtime_dir)
        check_bind(self._kit, "PRORL_HOME chooses another place")
        self._base = holding / "base"
        await asyncio.to_thread(make_base, self._base)
        self._host_image = holding / "image"
        self._host_binds = await asyncio.to_thread(make_host_image, self._host_image)
        await asyncio.to_thread(sweep_copies, self._runtime_dir)
        await self._image(self._config.image)

    async def _let_go(self) -> None:
        await asyncio.to_thread(self._images.close)

    async def _launch(self, spec: SandboxSpec, box: Box) -> Launch:
        image = await self._image(spec.image or self._config.image)
        binds = [f"{box.workspace}:/workspace", f"{box.tmp}:/tmp", f"{box.tmp}:/var/tmp", f"{self._base}:{INSIDE}:ro"]
        binds += [f"{self._base}/hosts:/etc/hosts:ro", f"{self._kit}:{INSIDE}/kit:ro", f"{box.socket_dir}:{INSIDE}/s"]
        if image == self._host_image:
            binds += [f"{path}:{path}:ro" for path in self._host_binds]
        if spec.sockets:
            binds += _socket_binds(spec.sockets, box)
        for path, inside in spec.binds.items():
            check_bind(path, "link it to another path")
            check_bind(inside, "choose another path inside")
            binds.append(f"{path}:{inside}:ro")
        argv = [self._binary, "-q", "-s", "exec", *isolation_flags(spec.network or self._config.network)]
        if (spec.writable or self._config.writable) == "image":
            argv += overlay_flags(image, box, self._binary)
            binds.append(f"{box.overlay}/upper:{INSIDE}/over:ro")  # so that the watch over the disk sees it
        for bind in binds:
            argv += ["--bind", bind]
        argv += [str(image), *server_argv(f"{INSIDE}/s/{box.socket.name}")]
        sockets = socket_environment({name: f"{INSIDE}/sockets/{name}" for name in spec.sockets})
        env = {"HOME": "/tmp", "LANG": "C.UTF-8", **sockets, **spec.env}
        settings = self._settings("/workspace", f"{INSIDE}/s", env, inherit_env=True)
        return Launch(argv, launcher_environment(self._binary, box), settings)

    async def _image(self, image: str) -> Path:
        """The file or directory to start; the first time that one is asked for, it is looked up, checked and perhaps
        copied to this node."""
        if image == HOST_IMAGE:
            return self._host_image
        return await asyncio.to_thread(self._images.get, image)

    def _explain(self, reason: str) -> str:
        return explained(reason)


def make_base(base: Path) -> None:
    """The directory that becomes /.prorl: mount points, and a copy of the tools' code, which is then compiled and
    readable whatever the package's own directory is like."""
    for name in ("kit", "s", "sockets", "over"):
        (base / name).mkdir(parents=True)
    (base / "hosts").write_text(_HOSTS)
    code = base / "code" / CODE.relative_to(CODE.parents[2])
    shutil.copytree(CODE, code, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(code, quiet=2, stripdir=str(base), prependdir=INSIDE)


def server_argv(socket: str) -> list[str]:
    """The tool server's command line in the sandbox: on the kit's Python, whatever the image has."""
    kit = f"{INSIDE}/kit"
    python = [f"{kit}/ld.so", "--library-path", f"{kit}/lib", f"{kit}/bin/python3", "-I", "-S"]
    return [*python, f"{INSIDE}/code/prorl_hpc/sandbox/tools/start.py", f"{kit}/site", kit, socket]


def isolation_flags(network: str) -> list[str]:
    """What every sandbox is started with, in words that Apptainer and SingularityCE share."""
    flags = ["--containall", "--cleanenv", "--no-home", "--no-init", "--hostname", _HOSTNAME, "--pwd", "/workspace"]
    # Nothing of the node's that the site's configuration would add (bind-paths), and no /tmp in memory.
    flags += ["--no-mount", "hostfs,sys,tmp,bind-paths"]
    if network != "host":
        flags += ["--net", "--network", "none"]
    if os.getuid() == 0:
        flags.append("--userns")  # the same path as everybody else's, and root's powers stay outside
    return flags


def overlay_flags(image: Path, box: Box, binary: str) -> list[str]:
    """All of the image can be written, into a directory of the box. SandboxError where that cannot work."""
    (box.overlay / "upper").mkdir(mode=0o755, parents=True)
    flags = ["--overlay", str(box.overlay)]
    if image.is_dir():
        # The kernel refuses to copy up what belongs to somebody who is not in the user namespace.
        if image.stat().st_uid != os.getuid():
            raise SandboxError(
                f"image {image} belongs to another user: sandbox.writable=image needs a directory of your own, or a .sif file"
            )
    elif os.getuid() != 0:
        # The files of a .sif are root's. Who is root inside can write over them, and is still only this user outside.
        if Path(binary).name != "apptainer":
            raise SandboxError(
                f"sandbox.writable=image needs apptainer for the file {image}; with singularity set sandbox.unpack_images=true"
            )
        flags += ["--fakeroot", "--ignore-fakeroot-command"]
    return flags


def check_bind(path: Path | str, cure: str) -> None:
    """SandboxError for a path that --bind would cut in pieces, and bind these."""
    if found := [mark for mark in ":,\n" if mark in str(path)]:
        raise SandboxError(f"{str(path)!r} cannot be bound into a sandbox: it has {found[0]!r} in it; {cure}")


def _socket_binds(sockets: dict[str, str], box: Box) -> list[str]:
    box.sockets.mkdir(mode=0o700)
    binds = [f"{box.sockets}:{INSIDE}/sockets:ro"]
    for name, path in sockets.items():
        check_bind(path, f"give the socket {name} another path")
        (box.sockets / name).touch()
        binds.append(f"{path}:{INSIDE}/sockets/{name}")
    return binds


def launcher_environment(binary: str, box: Box) -> dict[str, str]:
    """For the apptainer process itself. An allow list: the launcher's environment can be read in the sandbox."""
    env = {name: os.environ[name] for name in _FROM_HOST if name in os.environ}
    path = f"{Path(binary).parent}:{SHELL_PATH}"
    return {**env, "PATH": path, "HOME": str(box.path), "LANG": "C.UTF-8", MARKER: str(box.path)}


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
