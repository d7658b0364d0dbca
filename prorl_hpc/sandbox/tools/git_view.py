"""A git directory of our own that shows a repository: its commits and its work tree, none of its settings."""

from __future__ import annotations

import os
import re
import shutil

from prorl_hpc.sandbox.tools.toolset import Host, Refused
from prorl_hpc.sandbox.tools.workspace import WORKSPACE, Workspace, refusal, shown

_CONFIG = """[core]
\trepositoryformatversion = {version}
\tbare = false
\tfilemode = true
\tsymlinks = true
\tignorecase = false
\tprecomposeunicode = false
\tautocrlf = false
\tsafecrlf = false
\tfsmonitor =
\tuntrackedCache = false
\tpreloadIndex = false
\tprotectNTFS = false
\tprotectHFS = false
\tattributesFile = /dev/null
\texcludesFile = /dev/null
\thooksPath = /dev/null
\tcompression = 0
[index]
\tthreads = 1
[advice]
\taddEmbeddedRepo = false
{more}"""
_SHA256 = "[extensions]\n\tobjectformat = sha256\n"
EXCLUDE_BYTES = 1 << 20


class Repository:
    """Where a repository of the workspace has its work tree and its parts."""

    def __init__(self, workspace: Workspace, path: str) -> None:
        """The one that ``path`` is in. Refused where there is none, or where parts of it are outside the workspace."""
        self._workspace = workspace
        real = workspace.resolve(path, root_too=True)
        self.top = real
        while not os.path.lexists(os.path.join(self.top, ".git")):
            if self.top in (workspace.root, "/"):
                raise Refused(
                    f"{shown(path)} is in no git repository: make one before the work begins (git init && git add -A && "
                    f"git commit -m start), or give the path of one below {WORKSPACE}"
                )
            self.top = os.path.dirname(self.top)
        self.below = os.path.relpath(real, self.top)
        """``path`` as git names it."""
        self.git_dir = self._followed(os.path.join(self.top, ".git"), "gitdir: ")
        self.common_dir = self.git_dir
        if os.path.exists(link := os.path.join(self.git_dir, "commondir")):  # a linked work tree
            self.common_dir = self._followed(link, "")
        self.objects = self.part("objects")
        if not os.path.isdir(self.objects):
            raise Refused(f"the git repository at {shown(self.top)} is damaged: it has no directory .git/objects")

    def part(self, name: str) -> str:
        return self._workspace.resolve(os.path.join(self.common_dir, name))

    def text(self, directory: str, name: str) -> bytes:
        """A small file of the repository, empty where there is none."""
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            return b""
        with self._workspace.place(path) as place:
            fd = self._workspace.open_at(place, os.O_RDONLY)
            try:
                return self._workspace.read(fd, place, EXCLUDE_BYTES)
            finally:
                os.close(fd)

    def _followed(self, path: str, prefix: str) -> str:
        """The directory at ``path``, or the one that a file there names."""
        if os.path.isdir(path):
            return self._workspace.resolve(path)
        named = os.fsdecode(self.text(os.path.dirname(path), os.path.basename(path))).rstrip("\n")
        if not named.startswith(prefix):
            raise Refused(f"{shown(path)} is no git directory and names none")
        return self._workspace.resolve(os.path.join(os.path.dirname(path), named[len(prefix) :]))


class GitView:
    """Made for one call. New objects and the index lie in it; the repository is only read."""

    def __init__(self, host: Host, repository: Repository) -> None:
        self._path = os.path.join(host.settings.scratch, f"patch-{os.urandom(6).hex()}")
        self._repository = repository
        self._index = os.path.join(self._path, "index")
        self.argv, path = find_git(host)
        self.env = {
            "PATH": path,
            "HOME": self._path,
            "XDG_CONFIG_HOME": self._path,
            "LC_ALL": "C",
            "GIT_DIR": self._path,
            "GIT_WORK_TREE": repository.top,
            "GIT_INDEX_FILE": self._index,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }
        if "LD_LIBRARY_PATH" in os.environ:  # the image's git may need it
            self.env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]

    def make(self) -> None:
        """Refused where there is no room for it."""
        repository, path = self._repository, self._path
        sha256 = re.search(rb"objectformat\s*=\s*\"?sha256", repository.text(repository.common_dir, "config"), re.I)
        config = _CONFIG.format(version=int(bool(sha256)), more=_SHA256 if sha256 else "")
        try:
            for directory in ("", "objects", "objects/info", "info"):
                os.mkdir(os.path.join(path, directory), 0o700)
            for name in ("refs", "packed-refs", "shallow"):
                if os.path.exists(part := repository.part(name)):
                    os.symlink(part, os.path.join(path, name))
            # By a name of ours: a path with a line break could not be written down there.
            os.symlink(repository.objects, os.path.join(path, "borrowed"))
            self.write("objects/info/alternates", os.fsencode(os.path.join(path, "borrowed")) + b"\n")
            self.write("HEAD", repository.text(repository.git_dir, "HEAD"))
            self.write("info/exclude", repository.text(repository.common_dir, "info/exclude"))
            self.write("config", config.encode())
        except OSError as error:
            raise refusal(path, error) from None

    def remove(self) -> None:
        if os.path.isdir(self._path):
            shutil.rmtree(self._path)

    def env_of_agents_index(self) -> dict[str, str]:
        return {**self.env, "GIT_INDEX_FILE": os.path.join(self._repository.git_dir, "index")}

    def write(self, name: str, content: bytes) -> None:
        with open(os.path.join(self._path, name), "wb") as file:
            file.write(content)


def find_git(host: Host) -> tuple[list[str], str]:
    """How git is started, and the PATH for it: the one that was brought along, which is the same for every image and
    nothing inside can replace; without a kit the one on the PATH."""
    path = host.settings.env.get("PATH") or os.environ.get("PATH", os.defpath)
    kit = host.kit
    if kit and os.path.exists(os.path.join(kit, "bin", "git")):
        loader = [os.path.join(kit, "ld.so"), "--library-path", os.path.join(kit, "lib")]
        return [*loader, os.path.join(kit, "bin", "git")], path
    if found := shutil.which("git", path=path):
        return [found], path
    raise Refused("there is no git: neither on the node that runs this sandbox nor in its image (on the PATH)")
