"""Frames arrive whatever the pieces; what is none is an error."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.sandbox.tools import framing

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
headers = st.dictionaries(st.text(max_size=8), values, max_size=4)
frames = st.lists(st.tuples(headers, st.binary(max_size=200)), max_size=5)


@given(frames, st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_however_the_stream_is_cut(sent: list[tuple[dict[str, object], bytes]], sizes: list[int]) -> None:
    stream = b"".join(framing.encode(header, body) for header, body in sent)
    decoder, got, start = framing.Decoder(), [], 0
    for size in itertools.cycle(sizes):
        if start >= len(stream):
            break
        got += decoder.feed(stream[start : start + size])
        start += size
    assert got == sent


@given(st.binary(max_size=100))
def test_garbage_is_refused_or_waited_for(garbage: bytes) -> None:
    decoder = framing.Decoder()
    try:
        for header, _ in decoder.feed(garbage):
            assert isinstance(header, dict)
    except framing.BadFrame:
        pass


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "a list"),
        (b"3", "an? int"),
        (b"", "not JSON"),
        (b"[" * 200_000, "not JSON"),
    ],
)
def test_a_header_must_be_an_object(header: bytes, words: str) -> None:
    with pytest.raises(framing.BadFrame, match=words):
        list(framing.Decoder().feed(framing.pack(header, b"")))


def test_whole_frames_before_a_bad_one_arrive() -> None:
    got = []
    with pytest.raises(framing.BadFrame, match="announced"):
        for frame in framing.Decoder().feed(framing.encode({"a": 1}, b"x") + b"\xff" * 8):
            got.append(frame)
    assert got == [({"a": 1}, b"x")]


def test_sizes_are_checked_before_anything_is_kept() -> None:
    for lengths in ((framing.MAX_HEADER_BYTES + 1, 0), (2, framing.MAX_BODY_BYTES + 1)):
        with pytest.raises(framing.BadFrame, match="announced"):
            list(framing.Decoder().feed(struct.pack(">II", *lengths)))
    with pytest.raises(framing.BadFrame, match="at most"):
        framing.pack(b"{}", bytes(framing.MAX_BODY_BYTES + 1))
    largest = framing.pack(b"{}", bytes(framing.MAX_BODY_BYTES))
    decoder = framing.Decoder()
    got = [
        frame for start in range(0, len(largest), 1 << 16) for frame in decoder.feed(largest[start : start + (1 << 16)])
    ]
    assert len(got) == 1 and len(got[0][1]) == framing.MAX_BODY_BYTES
