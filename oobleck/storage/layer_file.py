"""Files with one layer each, in safetensors' format: https://huggingface.co/docs/safetensors (the format's section).

    8 bytes    length of the header, little-endian
    header     JSON: tensor name -> dtype, shape, data_offsets; "__metadata__" -> texts; padded with spaces
    data       the tensors, one after the other

Rejected: the library, because the bytes come straight from shared memory, in a process without torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import CorruptCheckpoint

from . import remote
from .layout import Entry, TensorSpec

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_WRITE_BYTES = 4 << 20
_METADATA = "__metadata__"


@dataclass(frozen=True, kw_only=True)
class LayerFile:
    path: Path
    tensors: Mapping[str, tuple[TensorSpec, memoryview]]
    metadata: Mapping[str, str]


def write_layer_file(
    path: Path, entries: Sequence[Entry], data: memoryview, *, metadata: Mapping[str, str]
) -> tuple[int, str]:
    """Write the entries' bytes of a slot's data as one file; returns its size and SHA-256. O(size).

    The name appears only once all bytes are on the disk. Raises OSError, with nothing left behind.
    """
    head = _header(entries, metadata)
    return write_file(path, [memoryview(head), *(data[entry.offset : entry.stop] for entry in entries)])


def write_file(path: Path, parts: Sequence[memoryview]) -> tuple[int, str]:
    """Write a file under another name, force it to the disk, then rename it; returns its size and SHA-256."""
    if not remote.is_here(path):
        return remote.write(path, parts)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    digest = hashlib.sha256()
    size = 0
    try:
        try:
            for part in parts:
                for start in range(0, len(part), _WRITE_BYTES):
                    piece = part[start : start + _WRITE_BYTES]
                    digest.update(piece)
                    size += len(piece)
                    while piece:  # the kernel may take fewer bytes than it is given
                        piece = piece[os.write(descriptor, piece) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # After the sync, so that a file with this name is whole even if the machine goes down in between.
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)
    return size, digest.hexdigest()


def file_digest(path: Path) -> str:
    """O(size). Raises OSError."""
    if not remote.is_here(path):
        return hashlib.sha256(remote.read(path)).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_layer_file(path: Path) -> LayerFile:
    """Map a layer's file, whose data is read on access. Raises CorruptCheckpoint and StoreError, which name it."""
    if not remote.is_here(path):
        return _parsed(path, remote.read_whole(path))
    try:
        with path.open("rb") as file:
            # torch needs writable memory, so the map is private: writes change only this process's copy.
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CorruptCheckpoint(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return _parsed(path, mapped)


def _parsed(path: Path, mapped: memoryview) -> LayerFile:
    try:
        return _parse(path, mapped)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: not a safetensors file ({error})") from error


def _parse(path: Path, mapped: memoryview) -> LayerFile:
    (length,) = _LENGTH.unpack_from(mapped)
    if length > min(_MAX_HEADER_BYTES, len(mapped) - _LENGTH.size):
        raise ValueError(f"a header of {length} bytes in {len(mapped)}")
    header = json.loads(bytes(mapped[_LENGTH.size : _LENGTH.size + length]))
    metadata = {str(key): str(value) for key, value in header.pop(_METADATA, {}).items()}
    data = mapped[_LENGTH.size + length :]
    tensors: dict[str, tuple[TensorSpec, memoryview]] = {}
    for name, fields in header.items():
        spec = TensorSpec(name=name, dtype=fields["dtype"], shape=tuple(fields["shape"]))
        start, stop = fields["data_offsets"]
        # A file from elsewhere may claim anything: no view may reach beyond the data, or fit its shape badly.
        if not 0 <= start <= stop <= len(data) or stop - start != spec.size_bytes:
            raise ValueError(f"{name}: bytes {start} to {stop} of {len(data)}, for {spec.size_bytes}")
        tensors[name] = (spec, data[start:stop])
    return LayerFile(path=path, tensors=tensors, metadata=metadata)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {_METADATA: dict(metadata)}
    offset = 0
    for entry in entries:
        spec, stop = entry.spec, offset + entry.spec.size_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, stop]}
        offset = stop
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format aligns the data to 8 bytes
    return _LENGTH.pack(len(raw)) + raw
