"""Describes the bytes of a slot: tensors, layer by layer, each aligned to a cache line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from oobleck.errors import CorruptCheckpoint

ALIGNMENT_BYTES = 64

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element, keyed by safetensors' names of types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES or any(size < 0 for size in self.shape):
            raise CorruptCheckpoint(f"tensor {self.name!r}: {self.dtype} {list(self.shape)} is not a type and a shape")

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor at its place in a slot."""

    layer: int
    spec: TensorSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.spec.size_bytes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of some layers, in order, and the metadata for every layer's file."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, layers: Mapping[int, Sequence[TensorSpec]], *, metadata: Mapping[str, str]) -> Layout:
        """Lay out tensors one after the other, at multiples of `ALIGNMENT_BYTES`."""
        entries: list[Entry] = []
        offset = 0
        for layer, specs in sorted(layers.items()):
            for spec in specs:
                entries.append(Entry(layer=layer, spec=spec, offset=offset))
                offset += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(entries=tuple(entries), metadata=dict(metadata))

    @property
    def part(self) -> int:
        """The number of this part of each layer, if devices shared each stage."""
        return int(self.metadata.get("part", "0"))

    @property
    def num_parts(self) -> int:
        return int(self.metadata.get("num_parts", "1"))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({entry.layer for entry in self.entries}))

    @cached_property
    def size_bytes(self) -> int:
        return max((-(-entry.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for entry in self.entries), default=0)

    def entries_of(self, layer: int) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.layer == layer)

    def to_json(self) -> bytes:
        # Offsets follow from the order of the tensors. As they are not written, they cannot contradict it.
        listed = [[entry.layer, entry.spec.name, entry.spec.dtype, list(entry.spec.shape)] for entry in self.entries]
        return json.dumps({"metadata": dict(self.metadata), "tensors": listed}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Layout:
        """Decode the output of `to_json`. Raises CorruptCheckpoint."""
        try:
            read = json.loads(raw)
            layers: dict[int, list[TensorSpec]] = {}
            for layer, name, dtype, shape in read["tensors"]:
                layers.setdefault(int(layer), []).append(TensorSpec(name=name, dtype=dtype, shape=tuple(shape)))
            return cls.of(layers, metadata=read["metadata"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"a layout that cannot be read: {error}") from error
