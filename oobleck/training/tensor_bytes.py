"""Tensors of torch over bytes of shared memory or of a file."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import torch

from oobleck.storage import FlashMemory, Layout, TensorSpec

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of types in files, which have no other types."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def as_tensor(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    """Return a tensor over these bytes, without a copy."""
    dtype = TORCH_DTYPES[spec.dtype]
    if not data:
        # `frombuffer` refuses an empty buffer.
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(spec.shape)


def no_room(directory: Path, layout: Layout, error: OSError, *, num_slots: int = 2) -> str:
    """Explain why there is no memory for a layout: the bytes needed, and the bytes free."""
    needed_mib = FlashMemory.bytes_for(layout, num_slots=num_slots) / 2**20
    needed = f"{needed_mib:,.1f} MiB are needed, for {num_slots} copies of what this worker saves"
    free = ""
    with suppress(OSError):
        disk = shutil.disk_usage(directory)
        free = f"; {disk.free / 2**20:,.1f} MiB of {disk.total / 2**20:,.1f} MiB are free there"
    return f"no shared memory in {directory}: {error.strerror}; {needed}{free}; a container gets more by --shm-size"
