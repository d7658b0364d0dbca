"""``edit``, called as the tool server calls it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.sandbox.tools import edit_text
from prorl_hpc.sandbox.tools.edit_history import Change, History
from prorl_hpc.sandbox.tools.editor import Tools
from prorl_hpc.sandbox.tools.loop import Loop
from prorl_hpc.sandbox.tools.toolset import Call, Host, Refused, Settings

Edit = Callable[..., str]


def host(root: Path, **changed: Any) -> Host:
    given = {
        "root": str(root),
        "env": {},
        "inherit_env": False,
        "output_limit_bytes": 4096,
        "strip_ansi": True,
        "ipython_mode": "inprocess",
        "open_paths": False,
        "scratch": str(root),
        "limits": {"max_file_mib": 1},
        "isolated": False,
    }
    return Host(Settings({**given, **changed}), Loop(), None, "")  # type: ignore[arg-type]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    tools = Tools(host(tmp_path))

    def call(command: str, path: str = "f", **arguments: Any) -> str:
        output = tools.edit(Call(1, "edit", 10, b""), command, path, **arguments).output
        assert isinstance(output, str)
        return output

    return call


# --- view -----------------------------------------------------------------------------------------


def test_a_file_is_shown_with_line_numbers(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one\n\n  three\n")
    assert edit("view") == "'f', lines 1 to 3 of 3:\n     1\tone\n     2\t\n     3\t  three\n"
    assert edit("view", view_from=2, view_to=2).endswith("of 3:\n     2\t\n")
    assert edit("view", view_from=3, view_to=99).endswith("3:\n     3\t  three\n")
    assert edit("view", "/workspace/f", view_from=3).endswith("3:\n     3\t  three\n")


@pytest.mark.parametrize(("view_from", "view_to"), [(4, 0), (3, 2), (-1, 0), (1, -2)])
def test_a_range_that_is_not_there_is_refused(edit: Edit, tmp_path: Path, view_from: int, view_to: int) -> None:
    (tmp_path / "f").write_text("1\n2\n3\n")
    with pytest.raises(Refused, match="has lines 1 to 3"):
        edit("view", view_from=view_from, view_to=view_to)


def test_a_long_file_is_cut_and_can_be_read_on(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("".join(f"line {n}\n" for n in range(1, 2001)))
    seen: list[str] = []
    start = 1
    while start:
        text = edit("view", view_from=start)
        seen += [line.split("\t")[1] for line in text.splitlines() if "\t" in line]
        start = int(text.rpartition("view_from=")[2][:-2]) if "cut here" in text else 0
    assert seen == [f"line {n}" for n in range(1, 2001)]


def test_a_long_line_is_cut(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x" * 5000 + "\nnext\n")
    assert "x[... 3000 more characters]\n     2\tnext" in edit("view")


def test_what_is_special_about_a_file_is_said(edit: Edit, tmp_path: Path) -> None:
    for content, remark in (
        (b"a\r\nb\r\n", "CRLF line endings"),
        (b"a\r\nb\n", "CRLF and LF"),
        (b"\xef\xbb\xbfa\n", "byte order mark"),
        (b"a", "no newline at the end"),
        (b"a\xffb\n", "not UTF-8"),
        (b"", "is empty"),
    ):
        (tmp_path / "f").write_bytes(content)
        assert remark in edit("view"), content


def test_a_directory_is_shown_two_levels_deep(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/x.py").touch()
    (tmp_path / "a/b/deep").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "nl\n").touch()
    (tmp_path / "up").symlink_to("/etc")
    assert edit("view", ".") == (
        "'.', 2 levels deep; 1 hidden entries are left out:\na/\na/b/\na/x.py\nnl\\n\nup -> /etc\n"
    )
    for number in range(300):
        (tmp_path / f"a/file-{number:010}").touch()
    assert len(edit("view", "/workspace")) < 4300 and "cut here" in edit("view", "/workspace")


# --- create ---------------------------------------------------------------------------------------


def test_create_makes_a_file_and_its_directories_but_overwrites_none(edit: Edit, tmp_path: Path) -> None:
    edit("create", "a/b/f", text="grüße\n")
    assert (tmp_path / "a/b/f").read_text() == "grüße\n"
    with pytest.raises(Refused, match="exists already"):
        edit("create", "a/b/f", text="x")
    (tmp_path / "dangling").symlink_to("nowhere/else")
    edit("create", "dangling", text="x")
    assert (tmp_path / "nowhere/else").read_text() == "x"
    with pytest.raises(Refused, match="directory"):
        edit("create", "a", text="x")
    with pytest.raises(Refused, match="Not a directory"):
        edit("create", "a/b/f/g", text="x")


def test_a_file_that_is_too_large_leaves_nothing(edit: Edit, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="at most 1048576"):
        edit("create", text="x" * (1 << 20) + "x")
    assert not (tmp_path / "f").exists()
    edit("create", text="x" * (1 << 20))
    with pytest.raises(Refused, match="at most"):
        edit("insert", line=0, text="y")
    assert (tmp_path / "f").stat().st_size == 1 << 20 and names(tmp_path) == ["f"]


# --- str_replace ----------------------------------------------------------------------------------


def test_replaces_what_is_there_once_and_shows_it(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("".join(f"line {n}\n" for n in range(1, 21)))
    answer = edit("str_replace", old="line 9\nline 10\n", new="ten\n")
    assert (tmp_path / "f").read_text().splitlines()[7:10] == ["line 8", "ten", "line 11"]
    assert "     5\tline 5\n" in answer and "     9\tten\n" in answer and "    13\tline 14\n" in answer
    assert "line 4\n" not in answer and "line 15\n" not in answer


def test_refusals_say_what_to_do(edit: Edit, tmp_path: Path) -> None:
    text = "def f():\n    return 1\n\n\ndef g():\n\treturn 1\n"
    (tmp_path / "f").write_text(text)
    for arguments, reason in (
        ({"old": "return 1", "new": ""}, r"found 2 times \(in lines 2, 6\): add lines around"),
        (
            {"old": "def g():\n    return 1", "new": ""},
            r"(?s)But for white space it is here.* 5\tdef g.* 6\t\treturn 1",
        ),
        ({"old": "    retrun 1", "new": ""}, r"(?s)nearest lines.* 2\t    return 1"),
        ({"old": "     2\t    return 1", "new": ""}, "begins with a line number"),
        ({"old": "zebra", "new": ""}, "Nothing in the file is like it"),
        ({"old": "def f", "new": "def f"}, "the same"),
        ({"old": "", "new": "x"}, "old is empty"),
        ({"old": "def f", "line": 3}, "takes path, old, new; line was given"),
    ):
        with pytest.raises(Refused, match=reason):
            edit("str_replace", **arguments)
        assert (tmp_path / "f").read_text() == text


def test_text_with_other_white_space_is_looked_for_in_bounded_time(
    edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_text("a\n" * 1000 + "b\n")
    with pytest.raises(Refused, match=r"(?s)But for white space.* 1001\tb"):
        edit("str_replace", old=" a\n" * 100 + "b", new="")
    monkeypatch.setattr(edit_text, "NEAREST_S", -1.0)
    with pytest.raises(Refused, match="Nothing in the file is like it"):
        edit("str_replace", old=" a\n" * 100 + "b", new="")


def test_places_that_overlap_are_several(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("aaa\n")
    with pytest.raises(Refused, match="found 2 times"):
        edit("str_replace", old="aa", new="b")
    (tmp_path / "f").write_text("x\n" * 1000)
    with pytest.raises(Refused, match=r"more than 20 times .*, 20, \.\.\.\)"):
        edit("str_replace", old="x", new="b")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_are_kept(edit: Edit, tmp_path: Path, ending: str) -> None:
    (tmp_path / "f").write_bytes(f"a{ending}b{ending}c".encode())
    edit("str_replace", old="a\nb", new="x\ny\nz")
    edit("insert", line=4, text="end\nof it\n")
    edit("insert", line=0, text="top")
    assert (tmp_path / "f").read_bytes().decode().split(ending) == ["top", "x", "y", "z", "c", "end", "of it"]


def test_mixed_line_endings_are_left_alone(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a\r\nb\nc\n")
    edit("str_replace", old="b\n", new="B\n")
    assert (tmp_path / "f").read_bytes() == b"a\r\nB\nc\n"
    with pytest.raises(Refused, match="mixes CRLF and LF"):
        edit("str_replace", old="a\nB", new="x")


def test_a_byte_order_mark_is_kept(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfa\n")
    edit("insert", line=0, text="first")
    assert (tmp_path / "f").read_bytes() == b"\xef\xbb\xbffirst\na\n"


@pytest.mark.parametrize(
    "command", [{"command": "insert", "line": 0, "text": "x"}, {"command": "str_replace", "old": "a"}]
)
def test_what_is_not_text_is_not_edited(edit: Edit, tmp_path: Path, command: dict[str, Any]) -> None:
    for content, reason in ((b"a\0", "binary"), (b"a\n\xff", "not UTF-8 text .line 2 has the byte 0xff")):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(Refused, match=reason):
            edit(**command)
        assert (tmp_path / "f").read_bytes() == content
    with pytest.raises(Refused, match="surrogate"):
        edit("create", "g", text="\ud800")


# --- insert ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "line", "text", "wanted"),
    [
        ("", 0, "x", "x\n"),
        ("a\nb\n", 0, "x", "x\na\nb\n"),
        ("a\nb\n", 1, "x\n", "a\nx\nb\n"),
        ("a\nb\n", 2, "x\ny", "a\nb\nx\ny\n"),
        ("a\nb", 2, "x\n", "a\nb\nx"),
        ("a\nb", 1, "\n", "a\n\nb"),
        ("a", 0, "x", "x\na"),
        ("a", 1, "\n", "a\n\n"),
    ],
)
def test_insert(edit: Edit, tmp_path: Path, content: str, line: int, text: str, wanted: str) -> None:
    (tmp_path / "f").write_text(content)
    edit("insert", line=line, text=text)
    assert (tmp_path / "f").read_text() == wanted


def test_insert_needs_a_line_that_is_there_and_a_text(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a\nb\n")
    for arguments, reason in (
        ({"text": "x"}, "needs line"),
        ({"text": "x", "line": 3}, r"has 2 lines, so it is 0 .* to 2"),
        ({"text": "x", "line": -2}, "has 2 lines"),
        ({"line": 1}, "text is empty"),
    ):
        with pytest.raises(Refused, match=reason):
            edit("insert", **arguments)


# --- undo -----------------------------------------------------------------------------------------


def test_undo_goes_back_step_by_step_to_before_the_file(edit: Edit, tmp_path: Path) -> None:
    edit("create", text="0\n")
    states = []
    for number in range(200):
        states.append((tmp_path / "f").read_text())
        edit("insert", line=number, text=f"line {number}")
    for state in reversed(states):
        edit("undo")
        assert (tmp_path / "f").read_text() == state
    assert "removed" in edit("undo") and not (tmp_path / "f").exists()
    with pytest.raises(Refused, match="no edit of 'f' to undo"):
        edit("undo")


def test_undo_leaves_alone_what_somebody_else_changed(edit: Edit, tmp_path: Path) -> None:
    edit("create", text="a\n")
    edit("str_replace", old="a", new="b")
    (tmp_path / "f").write_text("other\n")
    with pytest.raises(Refused, match="changed by something else"):
        edit("undo")
    edit("str_replace", old="other", new="mine")
    edit("undo")
    assert (tmp_path / "f").read_text() == "other\n"
    with pytest.raises(Refused, match="changed by something else"):
        edit("undo")
    (tmp_path / "f").write_text("b\n")
    edit("undo")
    assert (tmp_path / "f").read_text() == "a\n"


def test_files_have_histories_of_their_own_whatever_they_are_called(edit: Edit, tmp_path: Path) -> None:
    edit("create", "one", text="1")
    edit("create", "two", text="2")
    (tmp_path / "link").symlink_to("one")
    edit("str_replace", "link", old="1", new="3")
    edit("undo", "/workspace/one")
    assert ((tmp_path / "one").read_text(), (tmp_path / "two").read_text()) == ("1", "2")
    assert (tmp_path / "link").is_symlink()


def test_the_history_has_a_limit_and_forgets_the_oldest() -> None:
    history = History(10_000)
    for number in range(100):
        history.record(Change("f", b"x" * 1000, bytes([number])))
    kept = 0
    while change := history.last("f"):
        assert change.left(bytes([99 - kept])) and change.undone(bytes([99 - kept]))[0] == b"x" * 1000
        history.forget(change)
        kept += 1
    assert 5 <= kept <= 10
    history.record(Change("f", b"x" * 20_000, b""))
    assert history.last("f") is None


# --- how files are written ------------------------------------------------------------------------


def test_mode_links_and_names_are_kept(edit: Edit, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("a\n")
    path.chmod(0o4751)
    (tmp_path / "soft").symlink_to("f")
    edit("str_replace", "soft", old="a", new="b")
    assert (tmp_path / "soft").is_symlink() and path.read_text() == "b\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o4751
    (tmp_path / "hard").hardlink_to(path)
    edit("str_replace", "hard", old="b", new="longer than it was")
    edit("str_replace", "f", old="longer than it was", new="c")
    assert path.read_text() == "c\n" and path.samefile(tmp_path / "hard")
    assert names(tmp_path) == ["f", "hard", "soft"]


def test_a_reader_sees_the_old_file_or_the_new_one(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a" * 1000)
    with (tmp_path / "f").open() as reader:
        edit("str_replace", old="a" * 1000, new="b")
        assert reader.read() == "a" * 1000


def test_an_attribute_of_the_file_is_kept(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a\n")
    try:
        os.setxattr(tmp_path / "f", "user.note", b"kept")
    except OSError as error:
        pytest.skip(f"the file system has no attributes: {error}")
    edit("insert", line=0, text="x")
    assert os.getxattr(tmp_path / "f", "user.note") == b"kept"


def test_commands_that_are_not_there(edit: Edit) -> None:
    with pytest.raises(Refused, match="edit has view, create, str_replace, insert, undo"):
        edit("delete")
    with pytest.raises(Refused, match="No such file"):
        edit("str_replace", old="a", new="b")
    with pytest.raises(Refused, match="leaves the workspace"):
        edit("view", "/etc/passwd")


def test_large_files_are_left_to_bash(edit: Edit, tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(11 << 20)
    with pytest.raises(Refused, match="larger than 10 MiB: use bash"):
        edit("view")
