"""What holds of ``edit`` whatever the text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from test_editor import host

from prorl_hpc.sandbox.tools.edit_history import Change, common_prefix
from prorl_hpc.sandbox.tools.editor import Tools
from prorl_hpc.sandbox.tools.toolset import Call, Refused

CALL = Call(1, "edit", 10, b"")
few = st.text(alphabet="ab \n\tü", max_size=12)
any_text = st.one_of(few, st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=60))
any_bytes = st.one_of(st.binary(max_size=40), st.text(alphabet="ab", max_size=20).map(str.encode))


@contextmanager
def file_with(text: str) -> Iterator[tuple[Path, Tools]]:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "f"
        path.write_bytes(text.encode())
        yield path, Tools(host(path.parent))


def places(text: str, part: str) -> int:
    return sum(text.startswith(part, start) for start in range(len(text)))


@given(any_text, any_text, any_text)
def test_str_replace_is_pythons_where_there_is_one_place(text: str, old: str, new: str) -> None:
    with file_with(text) as (path, tools):
        before = path.read_bytes()
        try:
            tools.edit(CALL, "str_replace", "f", old=old, new=new)
        except Refused:
            crlf = "\r\n" in text
            assert path.read_bytes() == before
            assert not old or old == new or places(text, old) != 1 or crlf
        else:
            if "\r\n" not in text:
                assert places(text, old) == 1
                assert path.read_bytes() == text.replace(old, new).encode()
            tools.edit(CALL, "undo", "f")
            assert path.read_bytes() == before


@given(few, st.data())
def test_an_old_taken_from_the_text_is_found(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    old = text[start : data.draw(st.integers(start, len(text)))]
    with file_with(text) as (path, tools):
        try:
            tools.edit(CALL, "str_replace", "f", old=old, new="NEW")
        except Refused:
            assert places(text, old) != 1 or not old
        else:
            assert path.read_text() == text.replace(old, "NEW")


@given(any_text, any_text, st.integers(0, 5))
def test_insert_adds_lines_and_undo_takes_them_away(text: str, added: str, line: int) -> None:
    with file_with(text) as (path, tools):
        before = path.read_bytes()
        try:
            tools.edit(CALL, "insert", "f", line=line, text=added)
        except Refused:
            assert not added or line > before.count(b"\n")
            return
        after = path.read_bytes().split(b"\n")
        assert after[:line] == before.split(b"\n")[:line]
        blank_at_the_end = added.endswith("\n\n") or added == "\n"
        assert before == b"" or blank_at_the_end or before.endswith(b"\n") == (after[-1] == b"")
        tools.edit(CALL, "undo", "f")
        assert path.read_bytes() == before


@given(any_bytes, any_bytes)
def test_a_change_undoes_itself(before: bytes, after: bytes) -> None:
    change = Change("f", before, after)
    assert change.left(after) and change.undone(after)[0] == before
    assert change.left(before) == (before == after)


@given(any_bytes, any_bytes)
def test_the_common_start(one: bytes, other: bytes) -> None:
    size = common_prefix(one, other)
    assert one[:size] == other[:size]
    assert size == min(len(one), len(other)) or one[size] != other[size]
