"""What the builder's last lines mean, and how to cure it."""

from __future__ import annotations

import re

from prorl_hpc.messages.errors import SandboxError

HALF_INDEX = "unexpected end of JSON input"
_HINTS = (
    (
        r"no space left|disk quota exceeded",
        "there is no room: the builder needs several times the image's size in $APPTAINER_TMPDIR (else $TMPDIR, /tmp) and in "
        "$APPTAINER_CACHEDIR (else ~/.apptainer); point them at a larger disk",
    ),
    (
        r"toomanyrequests|rate limit|429 ",
        "the registry limits anonymous pulls: log in (`apptainer registry login docker://docker.io`), or wait",
    ),
    (
        r"unauthorized|denied|authentication required|\b40[13]\b",
        "the registry refused: the name may be wrong, or it needs a login (`apptainer registry login docker://HOST`, or "
        "$APPTAINER_DOCKER_USERNAME and $APPTAINER_DOCKER_PASSWORD)",
    ),
    (
        r"manifest unknown|not found: manifest|name unknown|\b404\b",
        "the registry has no such image or tag: look at its spelling",
    ),
    (
        r"no such host|connection refused|i/o timeout|network is unreachable|dial tcp|TLS handshake|could not connect",
        "this node does not reach the registry: run it on a node with internet (often the login node), or set $https_proxy",
    ),
    (HALF_INDEX, "the builder's cache of layers is damaged: `apptainer cache clean` empties it"),
    (r"server gave HTTP response to HTTPS client", "the registry speaks plain http: add --no-https"),
    (
        r"starting the `faked' daemon|--ignore-fakeroot-command",
        "the image's C library does not take the fakeroot program of this node, which stands in where /etc/subuid does not "
        "list you: ask for an entry there, or try --flag=--ignore-fakeroot-command",
    ),
    (
        r"newuidmap|subuid|user namespace|fakeroot",
        "building needs user namespaces, and for most definitions /etc/subuid or the `fakeroot` program on this node: ask its "
        "administrator, or build elsewhere and copy the .sif",
    ),
    (
        r"unexpected EOF|: EOF\b",
        "what it read ended too soon: an archive was cut short (copy or save it again), or the connection broke (try again)",
    ),
    (r"no such file or directory.*debootstrap|debootstrap.*not (found|in)", "install debootstrap on this node"),
)


class BuilderError(SandboxError):
    """A build, pull or inspection did not work. ``brief`` is for those who saw the builder's lines as they came."""

    def __init__(self, what: str, said: str, *, hinted: bool = False) -> None:
        hint = _hint(said) if hinted else ""
        super().__init__(f"{what}:\n{said}{hint}")
        self.brief = f"{what}{hint or '; the lines above say why'}"


def _hint(said: str) -> str:
    for pattern, hint in _HINTS:
        if re.search(pattern, said, re.IGNORECASE):
            return f"\n→ {hint}"
    return ""
