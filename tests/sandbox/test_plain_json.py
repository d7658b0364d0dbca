"""The tool server's JSON is JSON: the same as the standard library's, to the letter."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.sandbox.tools import plain_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_what_json_writes(value: object) -> None:
    text = plain_json.encode(value)
    assert text == json.dumps(value, separators=(",", ":"))
    assert plain_json.decode(text) == value


def test_it_needs_nothing_of_the_module_json() -> None:
    assert plain_json.encode.__module__ == plain_json.__name__ == plain_json.decode.__module__


def test_numbers_that_are_none_are_read() -> None:
    assert math.isnan(plain_json.decode("NaN")) and plain_json.decode("[-Infinity]") == [-math.inf]


@pytest.mark.parametrize("text", ["", "{", "[1,", '{"a":1}x', "nul", '"\n"', "[1 2]", "\ufeff{}", "{'a':1}"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        plain_json.decode(text)


def test_what_json_does_not_know_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a bytes is nothing that JSON knows"):
        plain_json.encode({"a": b""})
