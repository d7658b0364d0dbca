"""Frames between a worker and the tool server of one sandbox.

    u32 length of the header | u32 length of the body | header: JSON | body: bytes

The header is an object; the body holds what is large or not text (output, file content), so that it is neither escaped
nor encoded. Both ends check the lengths before they keep anything. Numbers are big-endian.

    → {"hello": VERSION, "settings": {…}}                           first, from the worker
    ← {"hello": VERSION}                                            it is ready
    → {"id": 1, "tool": "bash", "arguments": {…}, "timeout_s": 20}  any number at once; the body is what ``upload`` writes
    ← {"id": 1, "exit_code": 0, …}                                  in the order in which they end; the body is the output
    ← {"id": 1, "error": "…"}                                       the call could not be carried out at all
    → {"cancel": 1}                                                 the call is interrupted and answered
    ← {"ended": "…"}                                                the last frame, where the server ends by itself
"""

from __future__ import annotations

import struct

from prorl_hpc.sandbox.tools import plain_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

VERSION = 2
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 32 << 20
_LENGTHS = struct.Struct(">II")
_encode = plain_json.encode
_decode = plain_json.decode


class BadFrame(ValueError):
    """What arrived is no frame of this protocol."""


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """A frame; BadFrame when it is too large for one."""
    return pack(_encode(header).encode(), body)


def pack(header: bytes, body: bytes) -> bytes:
    """A frame of a header that is JSON already."""
    if len(header) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise BadFrame(
            f"a frame of {len(header)} + {len(body)} bytes: at most {MAX_HEADER_BYTES} and {MAX_BODY_BYTES} are taken"
        )
    return _LENGTHS.pack(len(header), len(body)) + header + body


def read_header(data: bytes) -> dict[str, Any]:
    """BadFrame when it is not a JSON object."""
    try:
        header = _decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadFrame(f"the header is a {type(header).__name__}, not an object")
    return header


class Decoder:
    """Bytes in, frames out, whatever the pieces. ``read`` makes of a header's bytes what ``feed`` gives for it."""

    def __init__(self, read: Callable[[bytes], Any] = read_header) -> None:
        self._read = read
        self._held = bytearray()
        self._wanted = _LENGTHS.size
        """How many bytes there must be before it is worth to look again."""

    def feed(self, data: bytes) -> Iterator[tuple[Any, bytes]]:
        """The frames that are complete now. BadFrame when this cannot become one, after the whole ones before it."""
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return
            data = bytes(self._held)
            self._held.clear()
        start = 0
        while (wanted := _frame_size(data, start)) <= len(data) - start:
            header, _ = _LENGTHS.unpack_from(data, start)
            middle = start + _LENGTHS.size + header
            yield self._read(data[start + _LENGTHS.size : middle]), data[middle : start + wanted]
            start += wanted
        self._held += data[start:]
        self._wanted = wanted


def _frame_size(data: bytes, start: int) -> int:
    """Of the frame that begins there, or of its lengths while these are not whole."""
    if len(data) - start < _LENGTHS.size:
        return _LENGTHS.size
    header, body = _LENGTHS.unpack_from(data, start)
    if header > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
        raise BadFrame(f"a frame of {header} + {body} bytes is announced")
    size: int = _LENGTHS.size + header + body
    return size
