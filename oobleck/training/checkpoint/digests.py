"""Digests of layers, equal for bitwise equal copies.

The digest of a tensor in host memory is its CRC-32. That of a tensor on a GPU is a sum computed there, so that only one
number leaves the GPU: the sum of words times odd numbers, modulo 2^64. With random odd numbers, two different states
collide about as rarely as with a random function (Dietzfelbinger, "Universal hashing and k-wise independent random
variables via integer arithmetic without primes", 1996).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

import torch

_COLUMNS = 1 << 14
_ROWS = 1 << 8
_BASE = 0x9E3779B97F4A7C15  # an odd number; the sums of several tensors are digits to this base
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@torch.no_grad()
def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the digest of a sequence of tensors, which never misses a single flipped bit. O(bytes)."""
    digest = 0
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.device.type == "cpu":
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            digest = zlib.crc32(raw.numpy(), digest)  # type: ignore[arg-type]  # an array is a buffer
        else:
            sums.append(sum_of_words(tensor))
    # One read for all tensors, since only this waits for the GPU.
    for value in torch.stack(sums).tolist() if sums else ():
        digest = (digest * _BASE + value) % (1 << 64)
    return digest - (1 << 64) if digest >= 1 << 63 else digest  # signed, as on the wire


def sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, each times an odd number for its place, as one int64 on the same device.

    A word's number is that of its column times that of its row. Needs additional memory for 4 million words. Does not
    wait for the device.
    """
    words = tensor.detach().contiguous().reshape(-1).view(_WORDS[tensor.element_size()])
    columns = _odd_numbers(_COLUMNS, 1, tensor.device)
    num_whole = words.numel() // _COLUMNS
    whole, rest = words[: num_whole * _COLUMNS].view(-1, _COLUMNS), words[num_whole * _COLUMNS :]
    of_rows = [(piece * columns).sum(1) for piece in torch.split(whole, _ROWS)]
    of_rows.append((rest * columns[: rest.numel()]).sum(0, keepdim=True))
    rows = _odd_numbers(1 << num_whole.bit_length(), 2, tensor.device)
    return (torch.cat(of_rows) * rows[: num_whole + 1]).sum()


@lru_cache(maxsize=64)
def _odd_numbers(count: int, seed: int, device: torch.device) -> torch.Tensor:
    # A fixed seed gives all workers the same numbers. An odd number has an inverse modulo 2^64, so a single different
    # word always changes the sum.
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator) | 1
    return drawn.to(device)
