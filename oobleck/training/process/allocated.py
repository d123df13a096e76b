"""Counts the memory that torch allocates, also on a CPU, for which it has no statistics of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes the memory of all tensors that operations make while this is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._seen: dict[int, tuple[Any, int]] = {}
        self.peak_bytes = 0
        """The most of it that was in use after any operation."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = operation(*args, **(kwargs or {}))
        # Views, and what is changed in place, have memory that was there before.
        before = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(returned):
            if storage._cdata not in before:
                reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's own
                self._seen[storage._cdata] = reference, storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return returned

    @property
    def num_bytes(self) -> int:
        """The bytes of it that are in use."""
        self._seen = {key: (kept, size) for key, (kept, size) in self._seen.items() if not kept.expired()}
        return sum(size for _, size in self._seen.values())


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
