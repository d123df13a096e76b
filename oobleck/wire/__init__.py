"""The protocol as bytes: writes and strictly reads dataclasses, as frames and as JSON lines. Does no I/O."""

from __future__ import annotations

from .codec import MAX_FRAME_BYTES, FrameDecoder, decode_json, encode_frame, encode_json, from_builtins, to_builtins

__all__ = [
    "MAX_FRAME_BYTES",
    "FrameDecoder",
    "decode_json",
    "encode_frame",
    "encode_json",
    "from_builtins",
    "to_builtins",
]
