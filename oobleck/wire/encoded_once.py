"""The shape of what thousands are told alike: it is written once, and its bytes go into each of their messages."""

from __future__ import annotations

import zlib
from collections import OrderedDict

import msgpack

from oobleck.json_table import unique_keys

from .shape import Shape, unexpected

MOST_BYTES = 16 * 1024 * 1024
"""What is longer, once it is unpacked, is not accepted."""
_KEPT = 4
"""So many values are told at the same time, at most: one for each plan that workers have."""
_BROKEN_TEXT = "surrogatepass"


def encoded_once(part: Shape) -> Shape:
    """Bytes that hold a value in msgpack, deflated: a plan names each node, and names are much alike."""
    kept: OrderedDict[int, tuple[object, bytes]] = OrderedDict()
    """By identity; the value is kept along, so that no other one has its identity."""

    def write(value: object) -> object:
        if id(value) not in kept:
            packed: bytes = msgpack.packb(part.write(value), unicode_errors=_BROKEN_TEXT)
            kept[id(value)] = (value, zlib.compress(packed))
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        return kept[id(value)][1]

    def read(raw: object) -> object:
        if type(raw) is not bytes:
            raise unexpected(f"a deflated {part.name}", raw)
        return part.read(_unpacked(raw, part.name))

    return Shape(name=part.name, values=part.values, builtins=(bytes,), write=write, read=read)


def _unpacked(raw: bytes, name: str) -> object:
    inflater = zlib.decompressobj()
    try:
        packed = inflater.decompress(raw, MOST_BYTES)
        if not inflater.eof or inflater.unused_data:
            raise unexpected(f"a deflated {name} of at most {MOST_BYTES} bytes", raw)
        return msgpack.unpackb(packed, object_pairs_hook=unique_keys, unicode_errors=_BROKEN_TEXT)
    except (ValueError, TypeError, zlib.error) as error:
        raise unexpected(f"a deflated {name} ({str(error) or type(error).__name__})", raw) from error
