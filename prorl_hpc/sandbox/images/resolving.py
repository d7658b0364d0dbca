"""What ``sandbox.image`` (or a task's image) means on this node.

In this order: ``host``; a reference with a scheme (docker://…), which must be in the cache; a path, when it has a ``/`` at
its start, ends with ``.sif``, or exists; a name of the cache; Docker's way without a scheme (``org/image:tag``).
"""

from __future__ import annotations

import difflib
from pathlib import Path

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images.cache import Entry, ImageCache
from prorl_hpc.sandbox.images.references import docker_reference, is_name, parse_reference
from prorl_hpc.sandbox.images.sif import check_sif, this_architecture

HOST_IMAGE = "host"
_ALLOWED = (
    "a .sif file, a sandbox directory, a reference or name of the image cache (`prorl-hpc image list`), or "
    f"{HOST_IMAGE!r}"
)
SHIPPED = ("agents", "base", "coding", "tiny")
"""Names of the definitions that this package brings along."""


def check(image: str, architecture: str = "") -> None:
    """For preflight: raises SandboxError when sandboxes could not be started on ``image``, with the command that cures it.

    Needs no apptainer; reads a few kB. The login node need not be of the nodes' architecture: pass ``this_architecture()``
    only where the sandboxes run on this very machine. ``host`` is always well.
    """
    if image != HOST_IMAGE:
        find(image, architecture)


def resolve(image: str) -> Path:
    """The .sif file or sandbox directory to start for ``image``, checked for this machine. Not for ``host``.

    A few looks at the file system, so call it in a thread (``asyncio.to_thread``), once per image. NodeImages.get (node_copy)
    calls it, and gives this node's copy. Raises SandboxError.
    """
    return find(image, this_architecture())[0]


def find(image: str, architecture: str = "") -> tuple[Path, Entry | None]:
    """The image, and what the cache knows of it (None for a file or directory outside)."""
    if not image.strip():
        raise SandboxError(f"the image is empty: sandbox.image takes {_ALLOWED}")
    cache = ImageCache()
    reference = parse_reference(image)
    if reference is not None:
        entry = cache.find(reference.cache_name)
        if entry is None:
            raise SandboxError(
                cache.why_absent(reference.cache_name) or _missing(cache, image, f"prorl-hpc image pull {reference}")
            )
        return _checked(cache, entry, architecture)
    path = Path(image).expanduser()
    if image.startswith(("/", "./", "../", "~")) or image.endswith(".sif") or ("/" in image and path.exists()):
        return _check_path(path, architecture), None
    if is_name(image) and (entry := cache.find(image)):
        return _checked(cache, entry, architecture)
    docker = docker_reference(image)
    if docker and (entry := cache.find(docker.cache_name)):
        return _checked(cache, entry, architecture)
    if path.exists():
        return _check_path(path, architecture), None
    raise SandboxError(_unknown(cache, image))


def _checked(cache: ImageCache, entry: Entry, architecture: str) -> tuple[Path, Entry]:
    path = cache.path(entry.name)
    try:
        check_sif(path, architecture)
    except SandboxError as error:
        raise SandboxError(f"{error}\nThe command: {cache.command_for(entry)}") from None
    return path, entry


def _check_path(path: Path, architecture: str) -> Path:
    if path.is_dir():
        if not (path / ".singularity.d").exists():
            raise SandboxError(f"image {path} is a directory but not an apptainer sandbox: it has no .singularity.d")
    elif not path.exists():
        raise SandboxError(f"image {path} does not exist on this node: sandbox.image takes {_ALLOWED}")
    else:
        check_sif(path, architecture)
    return path.absolute()


def _missing(cache: ImageCache, image: str, command: str) -> str:
    return (
        f"image {image!r} is not in the image cache {cache.directory}: bring it in first, on a node with internet that sees "
        f"that directory (often the login node): {command}"
    )


def _unknown(cache: ImageCache, image: str) -> str:
    docker = docker_reference(image)
    for name in ([image] if is_name(image) else []) + ([docker.cache_name] if docker else []):
        if why := cache.why_absent(name):
            return why
    if image in SHIPPED:
        return _missing(cache, image, f"prorl-hpc image build {image}")
    near = difflib.get_close_matches(image, [*(entry.name for entry in cache.entries()), *SHIPPED, HOST_IMAGE], n=1)
    if near:
        return f"image {image!r} is no file and not in the image cache {cache.directory}; did you mean {near[0]!r}?"
    if docker:
        return _missing(cache, image, f"prorl-hpc image pull docker://{image}")
    return (
        f"image {image!r} is no file, no name in the image cache {cache.directory} (`prorl-hpc image list`) and no reference "
        "(docker://NAME:TAG)"
    )
