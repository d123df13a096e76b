"""The sums of the devices that share a stage, in the middle of forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from oobleck.training.comm import Group


class StageSums:
    """Called by a model's own modules with a tensor: sums it over the stage's devices, in place."""

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        """`interrupted` ends the devices' waiting for each other in a step."""
        self._group: Group | None = None
        self._interrupted = interrupted

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum and return a tensor. Raises Interrupted or PeerLost."""
        assert self._group is not None
        self._group.all_reduce(tensor).wait(self._interrupted)
        return tensor

    def adopt(self, group: Group | None) -> None:
        """Put a plan in force, with this group of the stage's devices; None if there is only one."""
        self._group = group

    @contextmanager
    def within(self, group: Group | None, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Within the block sum in another group, until `interrupted`."""
        before = self._group, self._interrupted
        self._group, self._interrupted = group, interrupted
        try:
            yield
        finally:
            self._group, self._interrupted = before
