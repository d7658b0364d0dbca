"""What an image can be called, and the name that it has in the cache.

``docker://python`` and ``docker://docker.io/library/python:latest`` are one image and get one name; two different
references never share one, for the name ends with a digest of the whole reference.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.messages.errors import SandboxError

REMOTE = ("docker", "oras", "library", "https", "http")
"""Schemes that end with ``://``; all need the network."""
LOCAL = ("docker-archive", "oci-archive", "oci", "docker-daemon")
"""Schemes followed by a colon and a path (docker-daemon: by a name)."""
_SCHEME = re.compile(rf"(?:({'|'.join(REMOTE)})://|({'|'.join(LOCAL)}):)(.+)", re.DOTALL)
_DOCKER = re.compile(
    r"(?:(?P<host>[\w.-]+\.[\w.-]+(?::\d+)?|localhost(?::\d+)?|[\w.-]+:\d+)/)?"
    r"(?P<repository>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


@dataclass(frozen=True)
class Reference:
    """Where an image comes from."""

    kind: str
    """One of REMOTE or LOCAL."""
    place: str
    """What follows the scheme, in its normal form."""

    def __str__(self) -> str:
        return f"{self.kind}{'://' if self.kind in REMOTE else ':'}{self.place}"

    @property
    def cache_name(self) -> str:
        """File-name safe, readable, and of this reference alone."""
        place = Path(self.place).name if self.kind.endswith("archive") or self.kind == "oci" else self.place
        place = re.sub(r"@sha256:([0-9a-f]{8})[0-9a-f]*", r"-\1", place.removeprefix("docker.io/"))
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", place.removeprefix("library/").removesuffix(".sif"))
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:10]
        return f"{readable[:90].strip('-._') or self.kind}-{digest}"


def parse_reference(text: str) -> Reference | None:
    """None when ``text`` has no scheme that is known here; SandboxError when it has one and the rest is wrong."""
    match = _SCHEME.fullmatch(text.strip())
    if match is None:
        if "://" in text:
            scheme = text.split("://")[0]
            raise SandboxError(
                f"{text!r}: images come from {', '.join(f'{s}://' for s in REMOTE)}, not from {scheme}://"
            )
        return None
    kind, place = match[1] or match[2], match[3]
    if kind == "docker":
        return Reference(kind, _normal_docker(place, text))
    if kind in LOCAL and kind != "docker-daemon":
        path, colon, tag = place.partition(":") if kind == "oci" else (place, "", "")
        return Reference(kind, f"{Path(path).absolute()}{colon}{tag}")
    if kind in ("http", "https") and not re.fullmatch(r"[^/]+/.*[^/]", place):
        raise SandboxError(f"{text!r} names no file: {kind}:// fetches a .sif, such as {kind}://HOST/PATH/IMAGE.sif")
    if re.search(r"\s", place):
        raise SandboxError(f"{text!r} is not an image reference: it holds white space")
    return Reference(kind, place)


def read_reference(text: str) -> Reference:
    """What a person names to be pulled, with a scheme or in Docker's way; SandboxError says what it should be."""
    reference = parse_reference(text)
    if reference is not None:
        return reference
    path = Path(text.strip()).expanduser()
    if path.suffix == ".sif" or (path / ".singularity.d").is_dir():
        raise SandboxError(
            f"{text!r} needs no pull: an image outside the cache is named by its path, sandbox.image={text}"
        )
    if path.is_file() and re.search(r"^[./~]|\.(tar|tgz|tar\.\w+)$", text):
        raise SandboxError(
            f"{text!r} is a file: docker-archive:{text} if `docker save` wrote it, else oci-archive:{text}"
        )
    if path.is_dir() and (path / "index.json").is_file():
        raise SandboxError(f"{text!r} is a directory: oci:{text}")
    reference = docker_reference(text)
    if reference is None:
        raise SandboxError(
            f"{text!r} is no image reference: docker://[HOST/]NAME[:TAG], oras://…, docker-archive:FILE.tar"
        )
    return reference


def docker_reference(text: str) -> Reference | None:
    """A reference as Docker's users write it, without a scheme (``ghcr.io/org/image:tag``); None if it is none."""
    return Reference("docker", _normal_docker(text, text)) if _DOCKER.fullmatch(text.strip()) else None


def _normal_docker(place: str, text: str) -> str:
    match = _DOCKER.fullmatch(place.strip())
    if match is None:
        raise SandboxError(
            f"{text!r} is not a Docker reference: it is docker://[HOST/]NAME[:TAG][@sha256:DIGEST], and NAME is lower case"
        )
    host, repository = match["host"] or "docker.io", match["repository"]
    if host in ("index.docker.io", "registry-1.docker.io"):
        host = "docker.io"
    if host == "docker.io" and "/" not in repository:
        repository = f"library/{repository}"
    if match["digest"]:
        return f"{host}/{repository}@{match['digest']}"  # the tag says nothing then
    return f"{host}/{repository}:{match['tag'] or 'latest'}"


def check_name(name: str) -> str:
    """The name itself, or SandboxError for one that cannot be a name in the cache."""
    if not _NAME.fullmatch(name) or name.endswith((".sif", ".json")) or name == "host":
        raise SandboxError(
            f"{name!r} cannot name an image: letters, digits, '.', '_' and '-', at most 120, a letter or digit first, "
            "without .sif at the end, and not 'host'"
        )
    return name


def is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text))
