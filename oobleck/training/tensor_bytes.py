"""Tensors of torch around bytes: of shared memory, or of a file."""

from __future__ import annotations

import shutil
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
"""What files call types; they have no others."""
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def as_tensor(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    """A tensor whose memory these bytes are."""
    dtype = _TORCH_DTYPES[spec.dtype]
    if not data:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(spec.shape)


def no_room(directory: Path, layout: Layout, error: OSError) -> str:
    """Say why there is no memory for a layout: what is wanted, and what is there."""
    wanted = f"{FlashMemory.bytes_for(layout) / 2**20:,.1f} MiB are wanted, for two copies of what this worker saves"
    try:
        found = shutil.disk_usage(directory)
    except OSError:
        there = ""
    else:
        there = f"; {found.free / 2**20:,.1f} MiB of {found.total / 2**20:,.1f} MiB are free there"
    return f"no shared memory in {directory}: {error.strerror}; {wanted}{there}; a container gets more by --shm-size"
