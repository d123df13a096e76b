"""Sums over the members of a group while Gloo carries them; those that NCCL carries are in `nccl.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch._C._distributed_c10d import Work

from .staging import Courier, HostCopy


class Sum(Protocol):
    """A sum under way."""

    @property
    def poll_s(self) -> float | None:
        """How often it must be looked at; None where its waiter is woken."""
        ...

    def is_done(self) -> bool:
        """Return whether it is there, or has failed. Never blocks."""
        ...

    def conclude(self) -> None:
        """Once it is done: have what is computed from now on see it. Raises RuntimeError if it failed."""
        ...


class GlooSum:
    """Of a tensor in the host's memory."""

    poll_s = None

    def __init__(self, work: Work, announce: Callable[[], None]) -> None:
        self._future = work.get_future()
        self._future.add_done_callback(lambda _: announce())

    def is_done(self) -> bool:
        return self._future.done()

    def conclude(self) -> None:
        self._future.value()


class StagedSum:
    """Of a tensor on a device, through the host's memory. Sums of one courier are posted in their order."""

    poll_s = None

    def __init__(
        self,
        copy: HostCopy,
        tensor: torch.Tensor,
        courier: Courier,
        post: Callable[[torch.Tensor], Work],
        announce: Callable[[], None],
    ) -> None:
        """`copy` is the tensor's."""
        self._tensor = tensor
        self._copy = copy
        self._post = post
        self._announce = announce
        self._sum: GlooSum | None = None
        self._failure: RuntimeError | None = None
        courier.take(self._run)

    def is_done(self) -> bool:
        return self._failure is not None or (self._sum is not None and self._sum.is_done())

    def conclude(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._sum is not None
        self._sum.conclude()
        with torch.no_grad():
            self._tensor.copy_(self._copy.tensor, non_blocking=True)

    def _run(self) -> None:
        try:
            self._sum = GlooSum(self._post(self._copy.wait()), self._announce)
        except RuntimeError as error:
            self._failure = error
        self._announce()  # the sum may have been there before anybody could see that it was posted
