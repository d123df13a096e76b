"""What ranks say to each other while they load: a few bytes from all to all, and tensors on the CPU from one to one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Peers:
    """All ranks of this start. Every method but `send` and `receive` is called by all of them, in the same order."""

    def __init__(self, rank: int, world_size: int) -> None:
        """The default process group must exist where there are several ranks."""
        self.rank = rank
        self.world_size = world_size
        self._group: dist.ProcessGroup | None = None
        if world_size > 1 and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")

    def gather(self, said: bytes) -> list[bytes]:
        """Return what all ranks say, by rank."""
        if self.world_size == 1:
            return [said]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(said)]), group=self._group)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * self.world_size
        padded = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self._group)
        return [text.numpy().tobytes()[: int(size)] for text, size in zip(texts, sizes, strict=True)]

    def all_agree(self, is_so: bool) -> bool:
        """Return whether all ranks say so."""
        return all(said == b"1" for said in self.gather(b"1" if is_so else b"0"))

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send; returns what is to be waited for."""
        return dist.isend(_bytes_of(tensor), to, group=self._group)

    def receive(self, into: torch.Tensor, source: int) -> None:
        """Receive into a tensor that is contiguous."""
        dist.recv(_bytes_of(into), source, group=self._group)

    def close(self) -> None:
        """Give back what was made for this, once all have come so far."""
        self.gather(b"")
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
