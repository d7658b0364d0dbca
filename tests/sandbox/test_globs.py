"""Globs, against the shell's."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.sandbox.tools.globs import matcher, to_regex


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("*.py", "a/b.py", True),
        ("*.py", "a.pyc", False),
        ("a/*.py", "a/b.py", True),
        ("a/*.py", "a/b/c.py", False),
        ("a/**/*.py", "a/c.py", True),
        ("a/**/*.py", "a/b/b/c.py", True),
        ("/a/*", "a/x", True),
        ("**", "a/b", True),
        ("a?c", "a/c", False),
        ("[ab]", "b", True),
        ("[!ab]", "b", False),
        ("[", "[", True),
        ("{a,b{c,d}}", "bd", True),
        ("{a,b", "{a,b", True),
        (r"\*", "*", True),
        (r"\*", "a", False),
        ("a.b", "axb", False),
        ("a\nb*", "a\nbc\n", True),
    ],
)
def test_globs(pattern: str, path: str, fits: bool) -> None:
    assert matcher(pattern)(path, path.rpartition("/")[2]) is fits


@given(st.text(alphabet="ab*?[]!-\\{},/.^", max_size=12))
def test_every_pattern_is_one_or_an_error(pattern: str) -> None:
    try:
        re.compile(to_regex(pattern))
    except re.error:
        assert "[" in pattern  # a range that runs backwards


@settings(max_examples=30, deadline=None)
@given(
    st.text(alphabet="ab*?.", max_size=6),
    st.lists(st.text(alphabet="ab.", min_size=1, max_size=6), min_size=20, max_size=20),
)
def test_as_in_a_shell(pattern: str, names: list[str]) -> None:
    script = "p=$1; shift; for n; do case $n in $p) echo 1;; *) echo 0;; esac; done"
    shell = subprocess.run(["sh", "-c", script, "sh", pattern, *names], capture_output=True, check=True, text=True)
    fits = matcher(pattern)
    assert [fits(name, name) for name in names] == [line == "1" for line in shell.stdout.split()]
