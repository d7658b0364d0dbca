"""``search``: what is found, in which order, and that nothing makes it go on for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prorl_hpc.sandbox.attached_runtime import AttachedRuntime
from prorl_hpc.sandbox.protocol import Sandbox, SandboxSpec, ToolResult

TIMEOUT_S = 30.0
TREE = r"""
mkdir -p src/a .hid x.d; echo 'foo bar' > src/a/f.py; printf '1\n2\nfoo\n4\n5\n6\nfoo\n8\n' > src/a.txt
echo foo > .hid/x; printf 'foo\0' > b.bin; ln -s /etc etc; ln -s src/a.txt ln; git init -q .; echo foo > .git/foo
mkfifo fifo; touch $'nl\nx' $'\xff'; printf 'caf\xe9 foo\r\n' > latin; python3 -c "print('x' * 3000 + 'Foo' + 'y' * 3000)" > long
"""


@pytest.fixture
async def sandbox(runtime: AttachedRuntime) -> Sandbox:
    sandbox = await runtime.start(SandboxSpec("a"))
    assert (await sandbox.call("bash", {"command": TREE}, TIMEOUT_S)).exit_code == 0
    return sandbox


async def search(sandbox: Sandbox, pattern: str, *, timeout_s: float = TIMEOUT_S, **arguments: Any) -> ToolResult:
    return await sandbox.call("search", {"pattern": pattern, **arguments}, timeout_s)


async def lines(sandbox: Sandbox, pattern: str, **arguments: Any) -> list[str]:
    result = await search(sandbox, pattern, **arguments)
    assert result.exit_code == 0, result
    return result.output.splitlines()


async def test_content(sandbox: Sandbox) -> None:
    assert await lines(sandbox, "fo+") == [
        "latin:1:caf\N{REPLACEMENT CHARACTER} foo",
        "src/a.txt:3:foo",
        "src/a.txt:7:foo",
        "src/a/f.py:1:foo bar",
    ]
    assert await lines(sandbox, r"^foo\b.", path="/workspace/src") == ["/workspace/src/a/f.py:1:foo bar"]
    assert await lines(sandbox, "foo", path="src/a.txt") == ["src/a.txt:3:foo", "src/a.txt:7:foo"]
    assert await lines(sandbox, "foo", path="ln") == ["ln:3:foo", "ln:7:foo"]
    assert await lines(sandbox, "foo", path=".hid") == [".hid/x:1:foo"]
    assert (await lines(sandbox, "foo", hidden=True))[0] == ".hid/x:1:foo"
    assert not any(".git/" in line for line in await lines(sandbox, "foo", hidden=True))
    assert await lines(sandbox, "foo", path=".git", glob="foo") == [".git/foo:1:foo"]
    (found,) = [line for line in await lines(sandbox, "FOO", ignore_case=True) if line.startswith("long")]
    assert "xFooy" in found and len(found) < 500


async def test_globs_choose_the_files(sandbox: Sandbox) -> None:
    for glob, files in (
        ("*.py", ["src/a/f.py"]),
        ("*.{py,txt}", ["src/a.txt", "src/a/f.py"]),
        ("src/*", ["src/a.txt"]),
        ("**/f.py", ["src/a/f.py"]),
        ("src/**", ["src/a.txt", "src/a/f.py"]),
        ("[!s]*", ["latin", "src/a.txt", "src/a/f.py"]),
    ):
        found = await lines(sandbox, "foo", glob=glob)
        assert list(dict.fromkeys(line.split(":")[0] for line in found)) == files, glob


async def test_context(sandbox: Sandbox) -> None:
    assert await lines(sandbox, "foo", path="src/a.txt", context=1) == [
        *("src/a.txt-2-2", "src/a.txt:3:foo", "src/a.txt-4-4", "--"),
        *("src/a.txt-6-6", "src/a.txt:7:foo", "src/a.txt-8-8"),
    ]
    joined = await lines(sandbox, "foo", path="src/a.txt", context=3)
    assert [line[len("src/a.txt") + 1] for line in joined] == list("12345678")


async def test_names(sandbox: Sandbox) -> None:
    assert await lines(sandbox, "*", kind="name") == [
        *("b.bin", "etc", "fifo", "latin", "ln", "long", r"nl\nx", "src/", "src/a.txt", "src/a/", "src/a/f.py", "x.d/"),
        r"\xff",
    ]
    assert await lines(sandbox, "src/**/*.py", kind="name") == ["src/a/f.py"]
    assert await lines(sandbox, "A*", kind="name", ignore_case=True, path="src") == ["src/a.txt", "src/a/"]


async def test_nothing_found_is_an_exit_code(sandbox: Sandbox) -> None:
    for arguments in ({"pattern": "zebra"}, {"pattern": "zebra*", "kind": "name"}):
        result = await search(sandbox, **arguments)
        assert result.exit_code == 1 and "nothing was found" in result.output


async def test_a_glob_that_fits_nothing_is_named(sandbox: Sandbox) -> None:
    for arguments, hint in (
        ({"pattern": "foo", "glob": "["}, "0 files searched; in the glob '[', [ has no partner and means itself"),
        ({"pattern": "a[b", "kind": "name"}, "names searched; in the glob 'a[b', [ has no partner and means itself"),
        ({"pattern": "{a,b", "kind": "name"}, "{ has no partner"),
        ({"pattern": "foo", "glob": "*.zig"}, "0 files searched; the glob '*.zig' fits none"),
    ):
        result = await search(sandbox, **arguments)
        assert result.exit_code == 1 and hint in result.output, result
    assert "partner" not in (await search(sandbox, "[xyz][]a]*{q,r}", kind="name")).output


async def test_what_cannot_be_searched_is_refused(sandbox: Sandbox) -> None:
    for arguments, reason in (
        ({"pattern": "("}, "missing ), unterminated subpattern at position 0. To find these very characters"),
        ({"pattern": "a{99999999999999999999}"}, "not a regular expression"),
        ({"pattern": ""}, "pattern is empty"),
        ({"pattern": "x", "kind": "both"}, "content or name"),
        ({"pattern": "x", "kind": "name", "glob": "*"}, "the pattern itself is a glob"),
        ({"pattern": "x", "context": 99}, "context is 0 to 50"),
        ({"pattern": "x", "limit": 0}, "limit 1 or more"),
        ({"pattern": "x", "path": "nowhere"}, "No such file"),
        ({"pattern": "x", "path": "etc"}, "leaves the workspace"),
        ({"pattern": "x", "path": "fifo"}, "FIFO"),
        ({"pattern": "x", "path": "latin", "kind": "name"}, "Not a directory"),
    ):
        result = await search(sandbox, **arguments)
        assert result.exit_code == 2 and reason in result.output, (arguments, result)


async def test_what_is_too_much_is_cut_with_a_mark(sandbox: Sandbox) -> None:
    await sandbox.upload("many", b"needle\n" * 10_000)
    assert (await lines(sandbox, "needle", limit=3))[2:] == [
        "many:3:needle",
        "[... more than 3 hits: narrow the pattern, the path or the glob]",
    ]
    cut = await search(sandbox, "needle", limit=100_000)
    assert len(cut.output) < 4300 and cut.output.splitlines()[-1].startswith("[... cut here")
    assert cut.exit_code == 0


async def test_a_pattern_that_never_ends_is_stopped_and_holds_nobody_up(sandbox: Sandbox) -> None:
    await sandbox.upload("zzz", b"a" * 60 + b"\n")
    await sandbox.upload("aaa", b"a" * 60 + b"b\n")
    endless = asyncio.create_task(search(sandbox, "(a+)+b", timeout_s=2.0))
    await asyncio.sleep(0.1)
    assert (await sandbox.call("bash", {"command": "echo meanwhile"}, TIMEOUT_S)).output == "meanwhile\n"
    assert not endless.done()
    result = await endless
    assert result.timed_out and result.output.splitlines()[0] == "aaa:1:" + "a" * 60 + "b"
    assert "timed out after 2 s: simplify the pattern" in result.output
    cancelled = asyncio.create_task(search(sandbox, "(a+)+b", timeout_s=600))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    left = "for _ in $(seq 100); do n=$(ls -d /proc/$PPID/task/*/children | xargs cat | wc -w); [ $n = 1 ] && break; sleep 0.05; done; echo $n"
    assert (await sandbox.call("bash", {"command": left}, TIMEOUT_S)).output == "1\n"


async def test_a_tree_without_end_and_what_cannot_be_read(sandbox: Sandbox) -> None:
    deep = 'python3 -c \'import os\nfor _ in range(1200): os.mkdir("d"); os.chdir("d")\nopen("needle", "w").write("needle")\''
    assert (await sandbox.call("bash", {"command": deep}, TIMEOUT_S)).exit_code == 0
    result = await search(sandbox, "needle")
    assert result.exit_code == 1 and "1 files or directories could not be read" in result.output
    assert (await lines(sandbox, "needle*", kind="name", path="/".join("d" * 1200))) == [
        "/".join("d" * 1200) + "/needle"
    ]
