"""Rows that do not parse are named by file, line and field; held-out rows never occur in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.config.schema import DataConfig, TaskConfig
from prorl_hpc.messages.errors import ConfigError, DatasetError
from prorl_hpc.tasks.dataset import load_rows


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {"id": name, "kind": "first", "question": f"{name}?", "files": {"a.txt": name}, "answer": "1", **changes}


def write(path: Path, rows: list[Any]) -> Path:
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def task(train: Path, heldout: Path | None = None) -> TaskConfig:
    """Without ``heldout`` its file is not there, which only who loads the held-out rows finds out."""
    return TaskConfig(train=DataConfig(path=str(train)), heldout=DataConfig(path=str(heldout or train.parent / "none")))


def one_file(train: Path, size: int = 4, seed: int = 1) -> TaskConfig:
    return TaskConfig(train=DataConfig(path=str(train)), heldout=DataConfig(size=size, seed=seed))


def test_rows_come_back_in_order_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    rows = [row("a"), row("b")]
    assert load_rows(task(write(tmp_path / "t.jsonl", [rows[0], b"", b"  ", rows[1], b""])), "train") == rows


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(row("a")).encode() + b"\r\n" + json.dumps(row("b")).encode() + b"\r\n"
    )
    assert [r["id"] for r in load_rows(task(file), "train")] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{nope", "not JSON"),
        (b'{"id": "\xff"}', "not UTF-8 .byte 0xff at column 9"),
        ([1], "a list, expected a JSON object"),
        ({"question": "q"}, "field id is missing"),
        (row(""), "field id is ''"),
        ({**row("x"), "id": 7}, "field id is 7, expected a non-empty string"),
        (row("a"), r"field id is 'a', which .*t\.jsonl:1 already has"),
        ({k: v for k, v in row("x").items() if k != "answer"}, "field answer is missing: expected a str"),
        (row("x", answer=7), "field answer is a int, expected a str"),
        (row("x", answer=""), "field answer is empty"),
        (row("x", files={}), "field files is empty"),
        (row("x", files={"../etc/passwd": "x"}), r"field files has the name '\.\./etc/passwd'"),
        (row("x", files={"/etc/passwd": "x"}), "field files has the name"),
        (row("x", files={"a": 1}), r"field files\.a is a int"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path / "t.jsonl", [row("a"), b"", line])
    with pytest.raises(DatasetError, match=rf"t\.jsonl:3: .*{message}"):
        load_rows(task(file), "train")


def test_an_empty_file_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"t\.jsonl: the dataset is empty"):
        load_rows(task(write(tmp_path / "t.jsonl", [b"", b" "])), "train")
    with pytest.raises(
        DatasetError, match=r"^task\.train\.path=.*none\.jsonl: the dataset cannot be read: No such file"
    ):
        load_rows(task(tmp_path / "none.jsonl"), "train")


def test_ten_bad_rows_are_told_and_how_many_more(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", [row("a"), *({"id": f"x{n}"} for n in range(13)), b"nope"])
    with pytest.raises(DatasetError) as told:
        load_rows(task(file), "train")
    lines = str(told.value).splitlines()
    assert lines[0] == "14 rows cannot be used:"
    assert len(lines) == 12
    assert all("t.jsonl:" in line for line in lines[1:11])
    assert lines[-1].strip() == "and 4 more"


def test_rows_of_one_file_are_held_out_of_training(tmp_path: Path) -> None:
    rows = [row(f"r{n}") for n in range(50)]
    file = write(tmp_path / "t.jsonl", rows)

    def split(size: int, seed: int = 1) -> tuple[list[Any], list[Any]]:
        return load_rows(one_file(file, size, seed), "train"), load_rows(one_file(file, size, seed), "heldout")

    train, heldout = split(4)
    assert (len(train), len(heldout)) == (46, 4)
    assert sorted(train + heldout, key=rows.index) == rows
    assert split(4) == (train, heldout)
    assert split(4, seed=2)[1] != heldout
    assert len(split(64)[1]) == 5  # a tenth


def test_what_is_in_the_file_twice_is_not_held_out(tmp_path: Path) -> None:
    rows = [row("a"), {**row("a"), "id": "again"}, row("b")]
    assert load_rows(one_file(write(tmp_path / "t.jsonl", rows)), "heldout") == [rows[2]]
    with pytest.raises(DatasetError, match=r"task\.train\.path=.*too few to hold some out.*task\.heldout\.path"):
        load_rows(one_file(write(tmp_path / "t.jsonl", rows[:2])), "train")


def test_heldout_rows_that_are_also_trained_on_are_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [row("a"), row("b")])
    same_id = write(tmp_path / "id.jsonl", [row("c"), row("b", question="other?")])
    with pytest.raises(DatasetError, match=r"id\.jsonl: 1 held-out rows have ids of training rows \(b\)"):
        load_rows(task(train, same_id), "heldout")
    same_content = write(tmp_path / "content.jsonl", [{**row("b"), "id": "other"}])
    with pytest.raises(DatasetError, match=r"1 held-out rows have contents of training rows \(other\)"):
        load_rows(task(train, same_content), "heldout")
    distinct = write(tmp_path / "distinct.jsonl", [row("c")])
    assert load_rows(task(train, distinct), "heldout") == [row("c")]


def test_generated_splits_have_the_asked_size_and_share_nothing() -> None:
    config = TaskConfig(train=DataConfig(size=50, seed=3), heldout=DataConfig(size=20, seed=3))
    train, heldout = load_rows(config, "train"), load_rows(config, "heldout")
    assert (len(train), len(heldout)) == (50, 20)
    assert load_rows(config, "train") == train
    with pytest.raises(ConfigError, match=r"task\.train\.size=0"):
        load_rows(TaskConfig(train=DataConfig(size=0)), "train")
