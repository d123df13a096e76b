"""The protocol as bytes: messages in frames, journal entries as JSON lines.

It knows how any of our frozen dataclasses is written and strictly read back. It does no I/O.
"""

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
