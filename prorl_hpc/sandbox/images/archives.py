"""What an archive on this node says of itself, before the builder reads it: it must be whole, and for this machine.

The builder takes any architecture from an archive, and marks what it makes as this machine's. (From a registry, it picks by
architecture itself.)
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prorl_hpc.messages.errors import SandboxError
from prorl_hpc.sandbox.images.references import Reference
from prorl_hpc.sandbox.images.sif import runs_on, this_architecture

ARCHIVES = ("docker-archive", "oci-archive", "oci")


def check_archive(reference: Reference) -> None:
    """SandboxError for one that is absent, damaged or for another machine; a no-op for what is no archive."""
    if reference.kind not in ARCHIVES:
        return
    path = Path(reference.place.partition(":")[0])
    if not path.exists():
        raise SandboxError(f"there is no file {path} on this node, for {reference}")
    try:
        found = _architectures(reference.kind, path)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        why = str(error).splitlines()[0].rstrip(":")
        raise SandboxError(
            f"{path} cannot be read as an archive ({why}): it is damaged, cut short or of another kind; copy it again, or "
            "make it again with `docker save -o FILE IMAGE`"
        ) from error
    except (KeyError, ValueError, TypeError, IndexError, AttributeError):
        raise SandboxError(
            f"{path} holds no image as {reference.kind} has it: docker-archive:FILE is what `docker save` writes, oci-archive:FILE "
            "and oci:DIRECTORY have an index.json"
        ) from None
    here = this_architecture()
    if found and not set(found) & set(runs_on(here)):
        raise SandboxError(
            f"{path} is for {', '.join(found)}, and this machine is {here}: save the image for {here} "
            f"(`docker pull --platform linux/{here} IMAGE` before `docker save`), or pull it on a node of that kind"
        )


def _architectures(kind: str, path: Path) -> list[str]:
    """In Go's words; nothing where it does not say."""
    if kind == "oci":
        return _of_index(lambda name: json.loads((path / name).read_text()))
    with tarfile.open(path) as tar:

        def read(name: str) -> Any:
            member = tar.extractfile(tar.getmember(name))
            if member is None:
                raise KeyError(name)
            return json.loads(member.read())

        tar.getmembers()  # to its end: one that was cut short is known
        if kind == "oci-archive":
            return _of_index(read)
        configs = [read(image["Config"]) for image in read("manifest.json")]
    return sorted({config["architecture"] for config in configs if config.get("architecture")})


def _of_index(read: Callable[[str], Any]) -> list[str]:
    found = set()
    for manifest in read("index.json")["manifests"]:
        architecture = manifest.get("platform", {}).get("architecture")
        if not architecture:
            content = read(_blob(manifest["digest"]))
            architecture = read(_blob(content["config"]["digest"])).get("architecture") if "config" in content else ""
        if architecture:
            found.add(architecture)
    return sorted(found)


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
