"""What must hold of the images in which our own processes run; everything that does not, at once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prorl_hpc import __version__
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.messages.errors import RunError
from prorl_hpc.slurm.own_container import BINARIES, find_binary, image_of
from prorl_hpc.slurm.plan import COMPONENTS

LOOK_S = 60.0
_NEWUSER, _NEWNS = 0x10000000, 0x00020000
_LOOK = f"""
import ctypes, json, shutil
try:
    import prorl_hpc
    version = prorl_hpc.__version__
except ImportError:
    version = ""
program = next(filter(None, map(shutil.which, {BINARIES!r})), "")
nests = ctypes.CDLL(None).unshare({_NEWUSER | _NEWNS}) == 0
print(json.dumps({{"version": version, "program": program, "nests": nests}}))
"""


class Found(msgspec.Struct, frozen=True):
    """What an image has: the version of prorl_hpc (empty: none), the container program in it (empty: none), and whether
    a process in it may make a user namespace of its own."""

    version: str
    program: str
    nests: bool


def container_problems(config: ProrlConfig) -> list[str]:
    """Sentences that name the setting. On one machine each image is started once (half a second) and looked into; on
    Slurm only what can be seen from here is checked."""
    images: dict[str, list[str]] = {}
    for component in components_in_use(config):
        if image := image_of(config.cluster, component):
            images.setdefault(image, []).append(component)
    return [problem for image, components in images.items() for problem in _of_image(config, image, components)]


def components_in_use(config: ProrlConfig) -> list[str]:
    """Those that have processes."""
    trains = config.trainer.enabled
    return [c for c in COMPONENTS if getattr(config.cluster, c).nodes and (trains or c != "trainer")]


def _of_image(config: ProrlConfig, image: str, components: list[str]) -> Iterator[str]:
    own = [c for c in components if getattr(config.cluster, c).container]
    name = f"cluster.{own[0]}.container={image}" if own else f"cluster.container.image={image}"
    if "rollout" in components and config.sandbox.kind == "auto":
        yield (
            f"{name} is for the rollout workers too, and sandbox.kind=auto would quietly isolate nothing where containers "
            "cannot be nested: set sandbox.kind=apptainer (the image must have Apptainer, the nodes nested user "
            "namespaces), sandbox.kind=local, or an image for cluster.inference.container and cluster.trainer.container only"
        )
    if "://" in image:
        yield f"{name}: must be a .sif file or an image directory: `apptainer build NAME.sif {image}` makes one"
    elif "$" in image:
        return  # a node's own variable
    elif not Path(image).exists():
        yield f"{name} is not there: give a .sif file or an image directory that all nodes see"
    elif not os.access(image, os.R_OK):
        yield f"{name} cannot be read"
    elif config.cluster.kind == "local":
        yield from _inside(config, image, name, components)


def _inside(config: ProrlConfig, image: str, name: str, components: list[str]) -> Iterator[str]:
    try:
        found = look_into(config, image)
    except RunError as error:
        yield f"{name}: {error}"
        return
    python = f"cluster.container.python={config.cluster.container.python}"
    if not found.version:
        yield f"{name}: {python} there has no prorl_hpc: install it into the image, or name another Python"
    elif found.version != __version__:
        yield f"{name} has prorl_hpc {found.version}, this is {__version__}: build the image with the same version"
    if "rollout" in components and config.sandbox.kind == "apptainer":
        if not found.program:
            yield f"{name} has no apptainer, which the sandboxes of its workers need: put it in, or set sandbox.kind=local"
        elif not found.nests:
            yield (
                f"{name}: no user namespace can be made inside it on this machine, so no sandbox starts: raise "
                "user.max_user_namespaces, let the workers run on the node itself (an image for "
                "cluster.inference.container and cluster.trainer.container only), or set sandbox.kind=local"
            )


def look_into(config: ProrlConfig, image: str) -> Found:
    """Start the image here and see. Raises RunError with Apptainer's own words if it cannot be started."""
    settings = config.cluster.container
    command = [find_binary(os.environ), "-q", "exec", *settings.args, image, settings.python, "-I", "-c", _LOOK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RunError(f"the image did not start within {LOOK_S:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunError(
            f"{settings.python} cannot be started in it: {said[-1] if said else f'exit code {done.returncode}'}"
        )
    return msgspec.json.decode(lines[-1], type=Found)
