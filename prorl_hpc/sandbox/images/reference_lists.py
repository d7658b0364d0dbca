"""Read the images that a dataset names: a text file, or a column of JSONL, JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prorl_hpc.messages.errors import DatasetError, SandboxError
from prorl_hpc.sandbox.images.references import Reference, read_reference

COLUMNS = ("image", "docker_image", "image_name", "image_reference", "container_image")
"""Looked for, in this order, when no column is named."""


_SHOWN = 20
"""So many wrong lines are told."""


def read_references(path: Path, column: str = "") -> list[Reference]:
    """Each once, in the file's order. A reference without a scheme is Docker's. DatasetError names each line that is wrong."""
    if not path.is_file():
        raise DatasetError(
            f"{path} is not a file: it takes a list of images, one a line, or JSONL, JSON, CSV or Parquet"
        )
    found: dict[str, Reference] = {}
    wrong: list[str] = []
    for place, text in _texts(path, column):
        try:
            if isinstance(text, DatasetError):
                raise text
            reference = read_reference(text)
        except DatasetError as error:
            wrong.append(str(error))
        except SandboxError as error:
            wrong.append(f"{path}, {place}: {error}")
        else:
            found.setdefault(str(reference), reference)
    if wrong:
        more = f"\n… and {len(wrong) - _SHOWN} more lines" if len(wrong) > _SHOWN else ""
        raise DatasetError("\n".join(wrong[:_SHOWN]) + more)
    if not found:
        raise DatasetError(f"{path} names no image")
    return list(found.values())


def _texts(path: Path, column: str) -> Iterable[tuple[str, str | DatasetError]]:
    """(place for people, reference or why there is none)"""
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            text = line.split(" #")[0].strip()
            if text and not text.startswith("#"):
                yield f"line {number}", text
        return
    chosen = column
    for place, row in _rows(path, kind):
        if isinstance(row, DatasetError):
            yield place, row
            continue
        if not isinstance(row, dict):
            yield place, DatasetError(f"{path}, {place}: not an object with columns")
            continue
        chosen = chosen or _choose(path, place, row)
        value = row.get(chosen)
        if not isinstance(value, str) or not value.strip():
            near = difflib.get_close_matches(chosen, row, n=1)
            hint = f"did you mean {near[0]}? " if near and near[0] != chosen else ""
            yield (
                place,
                DatasetError(
                    f"{path}, {place}: no text in the column {chosen}; {hint}columns: {', '.join(map(str, row))}"
                ),
            )
            continue
        yield place, value.strip()


def _choose(path: Path, place: str, row: dict[str, Any]) -> str:
    for name in COLUMNS:
        if name in row:
            return name
    raise DatasetError(
        f"{path}, {place}: which column names the image? --column NAME; columns: {', '.join(map(str, row))}"
    )


def _rows(path: Path, kind: str) -> Iterable[tuple[str, Any]]:
    if kind == ".parquet":
        import pyarrow.parquet

        for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1):
            yield f"row {number}", row
    elif kind in (".csv", ".tsv"):
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ","), 2):
                yield f"line {number}", row
    elif kind == ".json":
        content = _parse(path, "", path.read_text())
        for number, row in enumerate(content if isinstance(content, list) else [content], 1):
            yield f"row {number}", row
    else:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip():
                try:
                    yield f"line {number}", _parse(path, f", line {number}", line)
                except DatasetError as error:
                    yield f"line {number}", error


def _parse(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{path}{place}: not JSON: {error}") from None
