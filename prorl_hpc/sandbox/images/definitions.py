"""Definitions to build: the shipped ones, a .def file, or a Dockerfile; and what they are built on."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import prorl_hpc
from prorl_hpc.messages.errors import ConfigError, SandboxError
from prorl_hpc.sandbox.images.cache import ImageCache
from prorl_hpc.sandbox.images.dockerfile import convert_dockerfile
from prorl_hpc.sandbox.images.references import check_name, is_name, parse_reference
from prorl_hpc.sandbox.images.resolving import SHIPPED

DEBIAN = "bookworm"


@dataclass(frozen=True)
class Definition:
    """Text in the format of Apptainer's definition files."""

    text: str
    kind: str
    """definition or dockerfile."""
    source: str
    """What the user named: a shipped name, or an absolute path."""
    directory: Path
    """Where the files that it copies lie."""
    name: str
    """What the image is called unless the user says otherwise."""
    notes: tuple[str, ...] = ()
    """What of a Dockerfile means nothing in a SIF."""


def shipped_directory() -> Path:
    package = Path(prorl_hpc.__file__).parent
    installed = package / "images"
    return installed if installed.is_dir() else package.parent / "images"


def load_definition(source: str) -> Definition:
    """A shipped name, a .def file, a Dockerfile, or a directory with a Dockerfile in it.

    ConfigError when there is nothing, SandboxError when it cannot be built."""
    if source in SHIPPED:
        path = shipped_directory() / f"{source}.def"
        return Definition(path.read_text(), "definition", source, path.parent, source)
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        path = path / "Dockerfile"
    if not path.is_file():
        near = difflib.get_close_matches(source, SHIPPED, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"there is nothing to build at {path}; {hint}build takes {', '.join(SHIPPED)}, a .def file, a Dockerfile, or a "
            "directory with a Dockerfile. For docker://… there is `prorl-hpc image pull`"
        )
    try:
        text = path.read_text()
    except ValueError:
        raise SandboxError(f"{path} is neither a definition nor a Dockerfile: it is not text") from None
    if re.search(r"^\s*bootstrap\s*:", text, re.IGNORECASE | re.MULTILINE):
        return Definition(text, "definition", str(path), path.parent, _name(path.stem))
    if not re.search(r"^\s*FROM\s", text, re.IGNORECASE | re.MULTILINE):
        raise SandboxError(f"{path} is neither a definition (no `Bootstrap:`) nor a Dockerfile (no `FROM`)")
    converted = convert_dockerfile(path)
    stem = path.parent.name if path.name == "Dockerfile" else path.name.replace("Dockerfile", "").strip(".")
    return Definition(converted.text, "dockerfile", str(path), path.parent, _name(stem), converted.notes)


def _name(stem: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")
    return check_name(name.lower() or "image")


def rebase(text: str, base: str, cache: ImageCache) -> str:
    """The definition on another base: a reference, a .sif or sandbox directory, a name of the cache, or
    ``debootstrap[:MIRROR]`` (Debian from a mirror, where no registry can be reached)."""
    header, body = _part(text)
    if re.search(r"^\s*bootstrap\s*:", body, re.I | re.M):
        raise SandboxError("it has several stages, each with a base of its own: --from cannot say which to replace")
    kept = [
        line for line in header.splitlines() if not re.match(r"\s*(bootstrap|from|osversion|mirrorurl)\s*:", line, re.I)
    ]
    # First of all: Apptainer takes no other field before Bootstrap.
    return "\n".join([*_base_fields(base, cache), *kept]).rstrip() + f"\n\n{body}"


def _base_fields(base: str, cache: ImageCache) -> list[str]:
    if base == "debootstrap" or base.startswith("debootstrap:"):
        mirror = base.partition(":")[2] or _mirror_of_this_node()
        return ["Bootstrap: debootstrap", f"OSVersion: {DEBIAN}", f"MirrorURL: {mirror}"]
    if reference := parse_reference(base):
        return [f"Bootstrap: {reference.kind}", f"From: {reference.place.removeprefix('docker.io/library/')}"]
    return ["Bootstrap: localimage", f"From: {_local_base(base, cache)}"]


def needed_base(definition: Definition) -> str:
    """The image of the cache (``From: NAME.sif``) that a definition is built on, when no such file lies beside it."""
    header, _ = _part(definition.text)
    if not re.search(r"^\s*bootstrap\s*:\s*localimage\s*$", header, re.I | re.M):
        return ""
    match = re.search(r"^\s*from\s*:\s*(\S+)\s*$", header, re.I | re.M)
    name = match[1].removesuffix(".sif") if match else ""
    return name if is_name(name) and not (definition.directory / f"{name}.sif").exists() else ""


def _part(text: str) -> tuple[str, str]:
    match = re.search(r"^%", text, re.MULTILINE)
    at = match.start() if match else len(text)
    return text[:at].rstrip() + "\n", text[at:]


def _local_base(base: str, cache: ImageCache) -> Path:
    if is_name(base) and cache.find(base):
        return cache.path(base)
    path = Path(base).expanduser().absolute()
    if is_name(base) and (why := cache.why_absent(base)):
        raise SandboxError(why)
    if not path.exists():
        hint = f": `prorl-hpc image build {base}` makes it" if base in SHIPPED else ""
        raise ConfigError(
            f"--from {base} is no reference, no file, and no name in the image cache {cache.directory}{hint}"
        )
    return path


def _mirror_of_this_node() -> str:
    for file in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))):
        if file.is_file():
            match = re.search(
                r"^(?:URIs:|deb\s(?:\[.*?\]\s*)?)\s*(https?://\S+/debian/?)(?:\s|$)", file.read_text(), re.M
            )
            if match:
                return match[1]
    raise SandboxError("this node has no Debian mirror in /etc/apt: name one, --from debootstrap:http://MIRROR/debian")
