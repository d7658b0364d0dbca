"""``patch``: what it holds, what it is not moved by, and that git applies it."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from odd_images import empty_image
from sandbox_runtimes import SMALL, prepared
from test_editor import host

from prorl_hpc.sandbox.attached import AttachedSandbox
from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, ToolResult
from prorl_hpc.sandbox.tools import patches
from prorl_hpc.sandbox.tools.framing import MAX_BODY_BYTES
from prorl_hpc.sandbox.tools.toolset import Call, Refused

TIMEOUT_S = 60.0
REPOSITORY = r"""
git init -q -b main . && git config user.email a@example.org && git config user.name a
printf 'a\nb\n' > changed; printf 'x\0y' > binary; echo hi > gone; seq 100 > moved; mkdir d kept; echo d > d/x; echo k > kept/k
echo '*.log' > .gitignore; ln -s changed link; echo run > script; echo tracked > kept/always.log; echo 1 > becomes_dir
git add -A; git add -f kept/always.log; git commit -qm base; git tag base
"""
CHANGES = r"""
echo c >> changed; printf 'z\0y' > binary; rm gone; mv moved renamed; rm -r d; echo D > d; chmod +x script
rm becomes_dir; mkdir becomes_dir; echo 2 > becomes_dir/2; rm link; ln -s nowhere link; echo more >> kept/always.log
echo ignored > x.log; echo forced > y.log; git add -f y.log; printf 'new \303\274' > $'n \303\274\nx'; printf 'crlf\r\n' > crlf
"""
ENVIRONMENT = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}


@pytest.fixture
async def sandbox(runtime: AttachedRuntime) -> Sandbox:
    sandbox = await runtime.start(SandboxSpec("a"))
    await bash(sandbox, REPOSITORY)
    return sandbox


async def bash(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.call("bash", {"command": command}, TIMEOUT_S)
    assert result.exit_code == 0, result
    return result.output


async def patch(sandbox: Sandbox, **arguments: Any) -> bytes:
    response = await sandbox._connected().call("patch", arguments, TIMEOUT_S)  # type: ignore[attr-defined]
    assert response.header.exit_code == 0, response.body
    return response.body


async def refused(sandbox: Sandbox, **arguments: Any) -> str:
    result: ToolResult = await sandbox.call("patch", arguments, TIMEOUT_S)
    assert result.exit_code == 2, result
    return result.output


def git(directory: Path, *arguments: str, stdin: bytes = b"") -> None:
    done = subprocess.run(["git", *arguments], cwd=directory, input=stdin, capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def content(root: Path) -> dict[str, tuple[bool, bytes]]:
    """Files (with their x bit) and links below ``root``, without .git."""
    found = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if name.split("/")[0] == ".git":
            continue
        if path.is_symlink():
            found[name] = (False, b"-> " + os.fsencode(path.readlink()))
        elif path.is_file():
            found[name] = (bool(path.stat().st_mode & stat.S_IXUSR), path.read_bytes())
    return found


async def fresh(sandbox: Sandbox, directory: Path, base: str = "base") -> Path:
    """A checkout of ``base``, made from a bundle."""
    await bash(sandbox, "git -c core.fsmonitor= bundle create -q .git/b --all")
    (directory / "b").write_bytes(await sandbox.download(".git/b"))
    git(directory, "clone", "-q", "-n", "b", "fresh")
    git(directory / "fresh", "checkout", "-q", base)
    return directory / "fresh"


async def test_all_that_changed_and_nothing_else(sandbox: Sandbox, tmp_path: Path) -> None:
    assert await patch(sandbox) == b""
    checkout = await fresh(sandbox, tmp_path)
    await bash(sandbox, CHANGES)
    diff = await patch(sandbox)
    git(checkout, "apply", "--index", stdin=diff)
    got = content(checkout)
    assert got["changed"] == (False, b"a\nb\nc\n") and got["binary"] == (False, b"z\0y")
    assert got["link"] == (False, b"-> nowhere") and got["script"] == (True, b"run\n")
    assert got["d"] == (False, b"D\n") and got["becomes_dir/2"] == (False, b"2\n") and got["crlf"][1] == b"crlf\r\n"
    assert got["n ü\nx"][1] == "new ü".encode() and got["kept/always.log"][1] == b"tracked\nmore\n"
    assert "gone" not in got and "x.log" not in got and got["y.log"][1] == b"forced\n"
    assert b"rename from moved\nrename to renamed\n" in diff and b"GIT binary patch" in diff


async def test_nothing_of_the_repository_is_touched(sandbox: Sandbox) -> None:
    await bash(sandbox, CHANGES + "git add changed; git rm -q --cached script")
    look = (  # not the times of objects: git notes that one is in use
        "find . -type f -not -path '*/objects/*' -printf '%p %T@ %s\n' | sort; find .git/objects -type f | sort;"
        "git --no-optional-locks status --porcelain; git ls-files -s; cat .git/HEAD; git stash list"
    )
    before = await bash(sandbox, look)
    await patch(sandbox)
    assert await bash(sandbox, look) == before


@pytest.mark.parametrize(
    "interference",
    [
        "git config diff.noprefix true; git config diff.mnemonicPrefix true; git config color.ui always; git config diff.context 0",
        "git config diff.external 'touch ran'; git config core.fsmonitor 'touch ran'; git config core.hooksPath /tmp/hooks",
        "git config filter.x.clean 'touch ran; echo'; git config diff.x.textconv 'touch ran; echo'; git config diff.x.binary true;"
        "echo '* filter=x diff=x' > .git/info/attributes; git config core.attributesFile $PWD/.git/info/attributes",
        "git config core.autocrlf true; git config core.fileMode false; git config core.symlinks false; git config core.ignoreCase true",
        "git config core.worktree /tmp; git config core.bare true; git config core.quotePath false; git config diff.renames false",
        "git config core.excludesFile $PWD/.git/ex; echo '*' > .git/ex; git config status.showUntrackedFiles no; git config diff.orderFile .git/ex",
        "git config extensions.worktreeConfig true; git config --worktree core.sparseCheckout true; git update-index --skip-worktree changed",
        "git update-index --assume-unchanged changed binary; touch -d @0 changed; export GIT_DIR=/nowhere GIT_INDEX_FILE=/nowhere",
        "git replace -f base:changed $(echo forged | git hash-object -w --stdin); git branch HEAD; git tag main",
        "echo '[' > .git/config; touch .git/index.lock .git/HEAD.lock; printf '#!/bin/sh\ntouch ran' > .git/hooks/post-index-change",
        "mkdir -p ~ && printf '[diff]\nnoprefix = true\n' > ~/.gitconfig; chmod 700 .git/hooks/* 2>/dev/null; true",
    ],
)
async def test_settings_of_the_agents_change_nothing(sandbox: Sandbox, interference: str) -> None:
    await bash(sandbox, CHANGES)
    undisturbed = await patch(sandbox, base="base")
    await bash(sandbox, f"{interference}; true")
    assert await patch(sandbox, base="base") == undisturbed
    assert "ran" not in await bash(sandbox, "ls . /tmp")


async def test_a_damaged_index_only_loses_what_it_alone_knew(sandbox: Sandbox) -> None:
    await bash(sandbox, "echo x > f; echo ignored > a.log; git add -f a.log; printf junk > .git/index")
    diff = await patch(sandbox)
    assert b"b/f\n" in diff and b"a.log" not in diff


async def test_what_is_not_utf_8_survives_as_text(sandbox: Sandbox, tmp_path: Path) -> None:
    await bash(
        sandbox,
        r"printf 'caf\xe9\n1\n2\n' > latin; seq 9 > plain; printf 'x\xe9\n' > moved; ln -s $'\xe9' ln; echo 1 > becomes;"
        r"printf 'x\xe9\n' > removed; printf '*.py diff=python\nlatin diff\n' > .gitattributes; git add -A; git commit -qm b",
    )
    checkout = await fresh(sandbox, tmp_path, "main")
    await bash(
        sandbox,
        r"sed -i s/1/one/ latin plain; printf '# \xe9\n' > new.py; mv moved away; chmod +x away; rm removed becomes;"
        r"ln -sfn $'\xe9\xff' ln; ln -s $'\xe8' becomes; printf 'new \303\274\n' > utf; printf $'\xe9' > $'n\n\xe9'",
    )
    result = await sandbox.call("patch", {}, TIMEOUT_S)
    git(checkout, "apply", "--index", stdin=result.output.encode())
    wanted = await bash(sandbox, "git add -A; git write-tree")
    assert subprocess.check_output(["git", "write-tree"], cwd=checkout, text=True) == wanted
    assert "+one\n" in result.output and "+new ü\n" in result.output and "rename from moved" in result.output


async def test_of_a_file_in_another_encoding_a_change_in_ascii_is_shown(sandbox: Sandbox, tmp_path: Path) -> None:
    await bash(sandbox, r"(printf 'x\xe9\n'; seq 20) > f; git add f; git commit -qm f")
    checkout = await fresh(sandbox, tmp_path, "main")
    await bash(sandbox, "sed -i s/^15/x/ f")
    diff = (await patch(sandbox)).decode()
    assert "@@ -13,7 +13,7 @@ x\n" in diff and "+x\n" in diff
    git(checkout, "apply", stdin=diff.encode())
    assert (checkout / "f").read_bytes() == await sandbox.download("f")


async def test_a_link_that_moved_below_its_own_path(sandbox: Sandbox, tmp_path: Path) -> None:
    checkout = await fresh(sandbox, tmp_path)
    await bash(sandbox, "rm link; mkdir link; ln -s changed link/link; mv moved renamed")
    git(checkout, "apply", "--index", stdin=await patch(sandbox))
    assert content(checkout)["link/link"] == (False, b"-> changed") and "renamed" in content(checkout)


async def test_images_of_cells_are_not_in_it(sandbox: Sandbox) -> None:
    await bash(sandbox, "mkdir -p .ipython_files d/.ipython_files; echo > .ipython_files/image_1.png; git add -f .ipy*")
    await bash(
        sandbox,
        "echo > d/.ipython_files/mine; mkdir r; git init -q r; git -C r -c user.name=a -c user.email=a "
        "commit -q --allow-empty -m x; echo x > r/x",
    )
    diff = await patch(sandbox)
    assert b"image_1" not in diff and b"+++ b/d/.ipython_files/mine" in diff
    assert b"+++ b/x" in await patch(sandbox, path="r")


async def test_base(sandbox: Sandbox) -> None:
    await bash(
        sandbox,
        "echo 1 > one; git add one; git commit -qm one; echo 2 > two; git branch later; git rm -q --cached gone",
    )
    head = (await bash(sandbox, "git rev-parse HEAD")).strip()
    assert await patch(sandbox) == await patch(sandbox, base=head) == await patch(sandbox, base="later")
    assert b"b/one" not in await patch(sandbox) and b"b/two" in await patch(sandbox)
    for base in ("base", "HEAD~1", "main^", head[:12] + "~"):
        assert b"b/one" in await patch(sandbox, base=base), base
    for base in ("nowhere", "", "--output=x", "HEAD~99", "0" * 40, "a\0b", "HEAD:gone"):
        assert "names no commit" in await refused(sandbox, base=base), base


async def test_a_path_chooses(sandbox: Sandbox) -> None:
    await bash(sandbox, CHANGES)
    assert (await patch(sandbox, path="kept")).startswith(b"diff --git a/kept/always.log b/kept/always.log\n")
    assert (await patch(sandbox, path="/workspace/gone")).count(b"diff --git") == 1
    assert await patch(sandbox, path="x.log") == b""
    assert "neither in the work tree nor in base" in await refused(sandbox, path="nothing")
    assert "leaves the workspace" in await refused(sandbox, path="..")


async def test_repositories_within_are_left_alone(sandbox: Sandbox, tmp_path: Path) -> None:
    checkout = await fresh(sandbox, tmp_path)
    inner = "git init -q {0}; echo x > {0}/x; git -C {0} add x; git -C {0} -c user.email=a -c user.name=a commit -qm x"
    await bash(
        sandbox, f"git init -q empty; echo x > empty/x; {inner.format('full')}; git -C kept init -q; echo >> kept/k"
    )
    await bash(sandbox, "echo f > f; cp -r full added; git -c advice.addEmbeddedRepo=false add added")
    diff = await patch(sandbox)
    git(checkout, "apply", "--index", stdin=diff)
    assert {name for name in content(checkout) if "x" in name.split("/")} == {"d/x"}
    assert b"b/f\n" in diff and b"b/kept/k\n" in diff and b"Subproject" not in diff
    assert (await patch(sandbox, path="full")) == b""


async def test_a_linked_work_tree(sandbox: Sandbox) -> None:
    await bash(
        sandbox, "git worktree add -q -b side tree; echo x > tree/x; cd tree; git add x; git commit -qm x; echo y > y"
    )
    assert (await patch(sandbox, path="tree")).count(b"diff --git") == 1
    assert b"b/x" in await patch(sandbox, path="tree", base="main")


async def test_no_repository(runtime: AttachedRuntime) -> None:
    sandbox = await runtime.start(SandboxSpec("a"))
    assert "in no git repository: make one before the work begins" in await refused(sandbox)
    await bash(sandbox, "git init -q .")
    assert "no commit yet" in await refused(sandbox)
    for trick in ("ln -s /usr .git", "echo 'gitdir: /usr' > .git", "mkdir .git; ln -s /usr .git/objects"):
        await bash(sandbox, f"rm -rf .git; {trick}")
        assert "leaves the workspace" in await refused(sandbox), trick
    for damage in ("echo nonsense > .git", "mkdir .git", "mkdir -p .git/objects; echo ref: refs/heads/x > .git/HEAD"):
        await bash(sandbox, f"rm -rf .git; {damage}")
        assert await refused(sandbox), damage


async def test_what_git_cannot_take_is_said(sandbox: Sandbox) -> None:
    await bash(sandbox, "rm changed; mkfifo changed")
    assert "git add failed" in await refused(sandbox)


async def test_a_patch_that_is_too_large_is_refused(sandbox: Sandbox) -> None:
    megabytes = (MAX_BODY_BYTES >> 20) // 6
    await bash(sandbox, f"for n in $(seq 8); do head -c {megabytes << 20} /dev/urandom > r$n; done")
    assert "more than 32 MiB" in await refused(sandbox)
    assert b"GIT binary patch" in await patch(sandbox, path="r1")


async def test_time(sandbox: Sandbox) -> None:
    result = await sandbox.call("patch", {}, 0.0)
    assert result.timed_out and "timed out after 0 s" in result.output
    assert await patch(sandbox) == b""


@pytest.mark.apptainer
async def test_an_image_without_git(runtime_dir: Path, tmp_path: Path) -> None:
    config = replace(SMALL, image=str(empty_image(tmp_path / "image")))
    runtime = await prepared("apptainer", runtime_dir, config)
    sandbox = await runtime.start(SandboxSpec("a"))
    assert isinstance(sandbox, AttachedSandbox)
    workspace: Path = sandbox._box.workspace
    git(workspace, "init", "-q")
    git(workspace, "-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "base")
    await sandbox.upload("new", b"x\n")
    assert b"+++ b/new\n" in await patch(sandbox)
    await runtime.close()


def test_no_git_at_all(tmp_path: Path) -> None:
    (tmp_path / ".git/objects").mkdir(parents=True)
    nowhere = host(tmp_path, env={"PATH": str(tmp_path)})
    with pytest.raises(Refused, match="there is no git"):
        next(patches.Tools(nowhere).patch(Call(1, "patch", 10, b"")))
