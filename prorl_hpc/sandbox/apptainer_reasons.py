"""What Apptainer's words mean for the people who can do something about them."""

from __future__ import annotations

import re

_HINTS = (
    (
        r"user namespace|userns|CLONE_NEWUSER|clone: operation not permitted|max_user_namespaces",
        "this node does not let users make user namespaces: ask its administrator for `sysctl -w "
        "user.max_user_namespaces=15000` (on Debian also kernel.unprivileged_userns_clone=1, on Ubuntu 24.04 also "
        "kernel.apparmor_restrict_unprivileged_userns=0), or for a setuid installation of apptainer",
    ),
    (
        r"no space left on device|disk quota exceeded",
        "the disk of the node's runtime directory (run.runtime_root) or your quota is full: make room there",
    ),
    (
        r"unknown userid|user account information",
        "this node does not know your user id (`getent passwd $(id -u)` is empty), which apptainer asks for: ask its "
        "administrator, or look whether the job's node has lost its directory service",
    ),
    (
        r"destination (\S+) doesn't exist in container",
        "the image has no such directory, and this apptainer cannot make it: build the image with `prorl-hpc image build`, "
        "which sees to it, or make the directory in the image",
    ),
    (
        r"overlay",
        "sandbox.writable=image needs an overlay in the node's runtime directory, which this kernel or file system refuses: "
        "choose a run.runtime_root on a local disk, or sandbox.writable=workspace",
    ),
    (
        r"/dev/fuse|squashfuse|fusermount|fuse: ",
        "a .sif image needs FUSE: ask for /dev/fuse to be open to users and squashfuse to be installed, or set "
        "sandbox.unpack_images=true, which needs neither",
    ),
    (
        r"image is for architecture|architecture .* not supported|exec format error",
        "the image was built for another kind of machine: pull or build it again on a node like this one",
    ),
    (r"network|CNI", "the node refuses `--net --network none`: ask its administrator to allow it to users"),
)


def explained(reason: str) -> str:
    """A failed start's reason, with what to do about it where that is known."""
    for pattern, hint in _HINTS:
        if re.search(pattern, reason, re.IGNORECASE):
            return f"{reason}\n{hint}"
    return reason
