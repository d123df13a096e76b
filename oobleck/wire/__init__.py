"""The protocol as bytes: messages in frames, journal entries as JSON lines.

It knows how any of our frozen dataclasses is written and strictly read back, and re-exports the messages
themselves, so that whoever speaks the protocol (workers too) imports only this package. It does no I/O.
"""

from __future__ import annotations

from oobleck.control.protocol import messages
from oobleck.control.protocol.messages import *  # noqa: F403 - every word of the protocol, also those still to come

from .codec import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    decode_json,
    encode_frame,
    encode_json,
    from_builtins,
    to_builtins,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "FrameDecoder",
    "decode_json",
    "encode_frame",
    "encode_json",
    "from_builtins",
    "to_builtins",
]
__all__ += messages.__all__
