"""``patch``: what was changed in a git repository of the workspace, as a diff that ``git apply`` takes.

The repository's configuration, index, hooks, filters and diff drivers are the agent's to change, so none of them is
used: git runs on a directory of ours (see git_view.py) that borrows the repository's objects and refs.
"""

from __future__ import annotations

import os
import time

from prorl_hpc.sandbox.tools.cell_runner import FILES
from prorl_hpc.sandbox.tools.children import Child, Collected, program
from prorl_hpc.sandbox.tools.framing import MAX_BODY_BYTES
from prorl_hpc.sandbox.tools.git_view import GitView, Repository
from prorl_hpc.sandbox.tools.toolset import Answer, Call, Host, Refused
from prorl_hpc.sandbox.tools.workspace import Workspace, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, ClassVar

MESSAGE_BYTES = 2000
NAMES_BYTES = 64 << 20
_GITLINK = b"160000"
_DIFF = [
    *("diff-index", "--cached", "--patch", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--unified=3", "--inter-hunk-context=0", "--diff-algorithm=myers", "--indent-heuristic", "--find-renames=50%"),
    *("-l1000", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short", "--ignore-submodules=none"),
]
_MOVED = b"\nsimilarity index 100%\nrename "
_LINK = b":120000 "
_ALL_BINARY = b"* -diff\n"
_LINKS_BINARY = ("-c", "diff.default.binary=true")
_NEXT_FILE = b"\ndiff --git "


class TimedOut(Exception):
    """The call's time was over, or its caller gave up."""


class Git:
    """The git commands of one call, each a child of the server's."""

    def __init__(self, host: Host, call: Call, view: GitView, repository: Repository) -> None:
        self._host = host
        self._call = call
        self._view = view
        self._top = repository.top
        self._deadline = time.monotonic() + call.timeout_s

    def run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        limit: int = NAMES_BYTES,
        env: dict[str, str] | None = None,
        settings: tuple[str, ...] = (),
    ) -> Generator[float, None, Collected]:
        """What one command writes; Refused with git's words where it fails."""
        output, errors = Collected(limit), Collected(MESSAGE_BYTES)
        body = program([*self._view.argv, *settings, *arguments], self._top, env or self._view.env)
        child = Child(self._host, body, output.add, errors.add, stdin)
        code = yield from child.wait(self._call, self._deadline)
        if code is None:
            raise TimedOut
        if code:
            said = errors.data.decode("utf-8", "replace").strip() or f"exit code {code}"
            raise Refused(f"git {arguments[0]} failed: {said}")
        return output

    def names(self, *arguments: str, env: dict[str, str] | None = None) -> Generator[float, None, list[bytes]]:
        output = yield from self.run(*arguments, "-z", env=env)
        return bytes(output.data).split(b"\0")[:-1]


class Tools:
    TOOLS: ClassVar[dict[str, dict[str, Any]]] = {"patch": {"base": "HEAD", "path": "."}}

    def __init__(self, host: Host) -> None:
        self._host = host
        self._workspace = Workspace(host)

    def patch(self, call: Call, base: str = "HEAD", path: str = ".") -> Generator[float, None, Answer]:
        """The changes below ``path`` from ``base`` (a commit, tag, branch or tree) to the work tree as it is: untracked
        files included, ignored ones not; file names are relative to the repository's top. Repositories within the
        repository (submodules too) are left as they are in ``base``, and so is the directory of ``ipython``'s images.
        All of it is UTF-8: files in another encoding are in it as binary ones. Nothing of the repository is touched."""
        repository = Repository(self._workspace, path)
        view = GitView(self._host, repository)
        git = Git(self._host, call, view, repository)
        try:
            view.make()
            tree = yield from _tree(git, base)
            yield from git.run("read-tree", tree)
            yield from _stage(git, view, repository, self._of_ours(repository))
            diff = yield from _diff(git, view, tree, _literally(repository.below))
        except TimedOut:
            hint = "let .gitignore name what is not part of the work (build products, data), or remove it"
            return Answer(f"[timed out after {call.timeout_s:g} s: {hint}]\n", None, timed_out=True)
        finally:
            view.remove()
        if len(diff) > MAX_BODY_BYTES:
            raise Refused(
                f"the patch has more than {MAX_BODY_BYTES >> 20} MiB: give path a smaller directory, let .gitignore name "
                "what is not part of the work (build products, data), or remove it"
            )
        return Answer(diff)

    def _of_ours(self, repository: Repository) -> set[bytes]:
        """The directory that ``ipython`` saves images in, where it is in this repository."""
        return {FILES.encode()} if repository.top == self._workspace.root else set()


def _diff(git: Git, view: GitView, tree: str, below: str) -> Generator[float, None, bytes]:
    """The patch, in UTF-8; more than MAX_BODY_BYTES where that is too long."""
    what = [*_DIFF, tree, "--", below]
    found = yield from git.run(*what, limit=MAX_BODY_BYTES + 1)
    if _MOVED in found.data:
        pairs = yield from git.run("diff-index", "--cached", "--raw", "-z", "--find-renames=100%", tree, "--", below)
        if any(pair.startswith(_LINK) and b" R" in pair for pair in bytes(pairs.data).split(b"\0")):
            # git apply does not see that it was a link, and refuses what is below its path now.
            what.insert(len(_DIFF), "--no-renames")
            found = yield from git.run(*what, limit=MAX_BODY_BYTES + 1)
    diff = bytes(found.data)
    if found.overflow or _is_text(diff):
        return diff
    view.write("info/attributes", _ALL_BINARY)
    binary = yield from git.run(*what, limit=2 * MAX_BODY_BYTES, settings=_LINKS_BINARY)
    if binary.overflow:
        return bytes(binary.data)
    of_each = zip(diff.split(_NEXT_FILE), bytes(binary.data).split(_NEXT_FILE), strict=True)
    return _NEXT_FILE.join(text if _is_text(text) else as_binary for text, as_binary in of_each)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _tree(git: Git, base: str) -> Generator[float, None, str]:
    if base and not base.startswith("-") and "\0" not in base:
        try:
            output = yield from git.run("rev-parse", "--verify", "--quiet", f"{base}^{{tree}}")
            return output.data.decode().strip()
        except Refused:
            pass  # said better below
    if base == "HEAD":
        raise Refused("the repository has no commit yet: make one before the work begins, and give its name as base")
    raise Refused(f"base {base!r} names no commit of the repository: git log --oneline --all shows which there are")


def _stage(git: Git, view: GitView, repository: Repository, of_ours: set[bytes]) -> Generator[float, None, None]:
    """Bring our index to the state of the work tree, without the directories ``of_ours``."""
    others = yield from git.names("ls-files", "--others", "--exclude-standard")
    staged = yield from git.names("ls-files", "--stage")
    _check_path(repository, [entry.split(b"\t", 1)[1] for entry in staged])
    inner = {name.rstrip(b"/") for name in others if name.endswith(b"/")}
    inner |= {entry.split(b"\t", 1)[1] for entry in staged if entry.startswith(_GITLINK)}
    inner |= of_ours
    excluded = [f":(top,exclude,literal){os.fsdecode(name)}" for name in sorted(inner)]
    yield from git.run("add", "--all", "--", ":(top)", *excluded)
    try:
        tracked = yield from git.names("ls-files", env=view.env_of_agents_index())
    except Refused:
        return  # the agent's index is damaged, and tells of nothing more
    known = yield from git.names("ls-files")
    forced = [name for name in set(tracked) - set(known) if _is_file_of(repository, name, inner)]
    if forced:  # ignored files that the agent added all the same
        yield from git.run("update-index", "--add", "-z", "--stdin", stdin=b"".join(n + b"\0" for n in sorted(forced)))


def _check_path(repository: Repository, in_base: list[bytes]) -> None:
    below = os.fsencode(repository.below)
    there = os.path.lexists(os.path.join(repository.top, repository.below))
    if not there and not any(name == below or name.startswith(below + b"/") for name in in_base):
        raise Refused(f"the path {shown(repository.below)} is neither in the work tree nor in base")


def _is_file_of(repository: Repository, name: bytes, inner: set[bytes]) -> bool:
    """Whether it is in the work tree itself: not behind a link, not in another repository."""
    path = os.path.join(os.fsencode(repository.top), name)
    directory = os.path.dirname(path)
    return (
        (os.path.isfile(path) or os.path.islink(path))
        and os.path.realpath(directory) == directory
        and not any(name.startswith(other + b"/") for other in inner)
    )


def _literally(path: str) -> str:
    return f":(top,literal){'' if path == '.' else path}"
