"""Whatever a tree was and became: the patch, applied to what it was, gives what it became."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox_runtimes import prepared
from test_patch_tool import TIMEOUT_S, content, git

from prorl_hpc.sandbox.attached import AttachedSandbox
from prorl_hpc.sandbox.protocol import SandboxSpec

NAMES = ["a", "b", "a b", "ü", "-d", "x\ny", '"q"', "\udcff", "t\t", "*", "[a]", "b.txt"]
lines = st.lists(st.sampled_from(["one", "two", "", "three \t", "ü"]), max_size=6).map("\n".join)
contents = st.one_of(
    lines.map(str.encode),
    lines.map(lambda t: t.encode() + b"\n"),
    lines.map(lambda t: t.encode("latin-1") + b"\xff\n"),
    st.binary(max_size=50),
    st.just(b"1\r\n2\r\n"),
)
# No link that leads to itself: git apply stumbles over the paths below one.
leaves = st.one_of(
    st.tuples(st.sampled_from(["file", "program"]), contents),
    st.tuples(st.just("link"), st.sampled_from([b"nowhere", b"../b", b"/etc", b"\xff"])),
)
trees: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(st.sampled_from(NAMES), leaves, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from(NAMES), st.one_of(leaves, inner), max_size=4),
    max_leaves=10,
)


def write(root: Path, tree: dict[str, Any]) -> None:
    for name, what in tree.items():
        path = root / name
        if isinstance(what, dict):
            path.mkdir()
            write(path, what)
        elif what[0] == "link":
            path.symlink_to(os.fsdecode(what[1]))
        else:
            path.write_bytes(what[1])
            path.chmod(0o755 if what[0] == "program" else 0o644)


def clear(root: Path) -> None:
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name != ".git":
                shutil.rmtree(path)
        else:
            path.unlink()


class Bed:
    """A sandbox whose workspace is at hand, for many examples."""

    def __init__(self, runner: asyncio.Runner, sandbox: AttachedSandbox) -> None:
        self._runner = runner
        self._sandbox = sandbox
        self.workspace: Path = sandbox._box.workspace

    def patch(self) -> str:
        result = self._runner.run(self._sandbox.call("patch", {}, TIMEOUT_S))
        assert result.exit_code == 0, result
        return result.output


@pytest.fixture
def bed(runtime_dir: Path) -> Iterator[Bed]:
    with asyncio.Runner() as runner:
        runtime = runner.run(prepared("local", runtime_dir))
        sandbox = runner.run(runtime.start(SandboxSpec("a")))
        assert isinstance(sandbox, AttachedSandbox)
        yield Bed(runner, sandbox)
        runner.run(runtime.close())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees, trees)
def test_a_patch_makes_one_tree_of_another(bed: Bed, before: dict[str, Any], after: dict[str, Any]) -> None:
    shutil.rmtree(bed.workspace / ".git", ignore_errors=True)
    clear(bed.workspace)
    write(bed.workspace, before)
    git(bed.workspace, "init", "-q")
    git(bed.workspace, "add", "--all")
    git(bed.workspace, "-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "base")
    with tempfile.TemporaryDirectory() as directory:
        git(Path(directory), "clone", "-q", str(bed.workspace), "fresh")
        clear(bed.workspace)
        write(bed.workspace, after)
        diff = bed.patch()
        wanted, checkout = content(bed.workspace), Path(directory) / "fresh"
        if diff:
            git(checkout, "apply", "--index", stdin=diff.encode())
        assert content(checkout) == wanted
