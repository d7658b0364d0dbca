"""Frames between a worker and the tool server of one sandbox.

    u32 length of the header | u32 length of the body | header: JSON | body: bytes

The header is an object; the body holds what is large or not text (output, file content), so that it is neither escaped
nor encoded. Both ends check the lengths before they keep anything. Numbers are big-endian.

    → {"hello": VERSION, "settings": {…}}                           first, from the worker
    ← {"hello": VERSION, "shell": "bash"}                           when the shell answers
    → {"id": 1, "tool": "bash", "arguments": {…}, "timeout_s": 20}  any number at once; the body is what ``upload`` writes
    ← {"id": 1, "exit_code": 0, …}                                  in the order in which they end; the body is the output
    ← {"id": 1, "error": "…"}                                       the call could not be carried out at all
    → {"cancel": 1}                                                 the call is interrupted and answered
    ← {"ended": "…"}                                                the last frame, where the server ends by itself
"""

from __future__ import annotations

import json
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERSION = 2
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 32 << 20
_HEAD = struct.Struct(">II")
_encode = json.JSONEncoder(separators=(",", ":")).encode


class BadFrame(ValueError):
    """What arrived is no frame of this protocol."""


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    head = _encode(header).encode()
    if len(head) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise BadFrame(
            f"a frame of {len(head)} + {len(body)} bytes: at most {MAX_HEADER_BYTES} and {MAX_BODY_BYTES} are taken"
        )
    return _HEAD.pack(len(head), len(body)) + head + body


class Decoder:
    """Bytes in, frames out, whatever the pieces."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that are complete now. BadFrame when this cannot become one."""
        held = self._held
        held += data
        while len(held) >= _HEAD.size:
            head, body = _HEAD.unpack_from(held)
            if head > MAX_HEADER_BYTES or body > MAX_BODY_BYTES:
                raise BadFrame(f"a frame of {head} + {body} bytes is announced")
            start, middle, end = _HEAD.size, _HEAD.size + head, _HEAD.size + head + body
            if len(held) < end:
                return
            try:
                header = json.loads(held[start:middle])
            except ValueError as error:
                raise BadFrame(f"the header is not JSON: {error}") from None
            if not isinstance(header, dict):
                raise BadFrame(f"the header is a {type(header).__name__}, not an object")
            content = bytes(held[middle:end])
            del held[:end]
            yield header, content
