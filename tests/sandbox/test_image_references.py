"""What images are called, and what a list of a dataset's images may look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.messages.errors import DatasetError, SandboxError
from prorl_hpc.sandbox.images.reference_lists import read_references
from prorl_hpc.sandbox.images.references import Reference, check_name, docker_reference, is_name, parse_reference


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("docker://python", "docker://docker.io/library/python:latest"),
        ("docker://docker.io/python:3.12-slim", "docker://docker.io/library/python:3.12-slim"),
        ("docker://org/tool", "docker://docker.io/org/tool:latest"),
        ("docker://ghcr.io/org/tool:1", "docker://ghcr.io/org/tool:1"),
        ("docker://localhost:5000/a/b:1", "docker://localhost:5000/a/b:1"),
        (f"docker://a/b:1@sha256:{'0' * 64}", f"docker://docker.io/a/b@sha256:{'0' * 64}"),
        ("oras://ghcr.io/org/tool:1", "oras://ghcr.io/org/tool:1"),
        ("docker-archive:/data/tool.tar", "docker-archive:/data/tool.tar"),
    ],
)
def test_references_have_one_normal_form(given: str, normal: str) -> None:
    reference = parse_reference(given)
    assert reference is not None and str(reference) == normal
    again = parse_reference(normal)
    assert again is not None and again.cache_name == reference.cache_name
    assert check_name(reference.cache_name) == reference.cache_name


def test_names_can_be_read() -> None:
    assert Reference("docker", "docker.io/library/python:3.12-slim").cache_name.startswith("python-3.12-slim-")
    assert Reference("docker-archive", "/data/some/tool.tar").cache_name.startswith("tool.tar-")


@pytest.mark.parametrize("text", ["base", "/a/b.sif", "./x.sif", "a/b"])
def test_paths_and_names_are_no_references(text: str) -> None:
    assert parse_reference(text) is None


@pytest.mark.parametrize("text", ["ftp://x/y", "docker://", "docker://Upper/case", "docker://a b", "docker://a/b:t:t"])
def test_wrong_references_are_refused(text: str) -> None:
    if text == "docker://":
        with pytest.raises(SandboxError, match="images come from"):
            parse_reference(text)
        return
    with pytest.raises(SandboxError, match="docker://"):
        parse_reference(text)


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60))
def test_different_references_have_different_names_that_are_safe(one: str, other: str) -> None:
    names = [Reference("oras", place).cache_name for place in (one, other)]
    assert all(is_name(name) and "/" not in name for name in names)
    assert (names[0] == names[1]) == (one == other)


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "x.sif", "x.json", "host", "a b", "x" * 121])
def test_names_that_files_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(SandboxError, match="cannot name an image"):
        check_name(name)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_lists_of_all_kinds_say_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": 1, "image": "org/one:1"}, {"id": 2, "image": "docker://org/two"}, {"id": 3, "image": "org/one:1"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "list.parquet")
    files = [
        _written(tmp_path / "list.txt", "# images\norg/one:1\n\ndocker://org/two  # the second\norg/one:1\n"),
        _written(tmp_path / "list.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        _written(tmp_path / "list.json", json.dumps(rows)),
        _written(tmp_path / "list.csv", "id,image\n1,org/one:1\n2,docker://org/two\n3,org/one:1\n"),
        tmp_path / "list.parquet",
    ]
    expected = [docker_reference("org/one:1"), docker_reference("org/two")]
    for file in files:
        assert read_references(file) == expected, file


def test_wrong_lists_are_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"list.txt, line 2: 'NO GOOD'"):
        read_references(_written(tmp_path / "list.txt", "a/b\nNO GOOD\n"))
    with pytest.raises(DatasetError, match=r"line 2: no text in the column imgae; did you mean image\?"):
        read_references(_written(tmp_path / "list.jsonl", '\n{"image": "a/b"}\n'), "imgae")
    with pytest.raises(DatasetError, match="line 1: not JSON"):
        read_references(_written(tmp_path / "bad.jsonl", "{\n"))
    with pytest.raises(DatasetError, match="--column NAME; columns: x, y"):
        read_references(_written(tmp_path / "none.csv", "x,y\n1,2\n"))
    with pytest.raises(DatasetError, match="names no image"):
        read_references(_written(tmp_path / "empty.txt", "\n"))
    with pytest.raises(DatasetError, match="is not a file"):
        read_references(tmp_path / "absent.txt")
