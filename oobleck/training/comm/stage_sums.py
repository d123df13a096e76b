"""Sums over the devices that share a stage, where the model's own modules ask for them.

On GPUs the host launches on and waits for none of them: an abort leaves parts of sums, and all that was computed from
them is forgotten with the step. So three things wait until the device is done, and end if a sum was aborted: the step
itself (`conclude`), sums with other stages (`Group.all_reduce`), and sections (`expect`). Messages to other stages need
no such care, as a pipeline's communicators are given up together, before the first of them is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from oobleck.planner import WorkerId

from .group import Group


class StageSums:
    """The sums of one worker's stage, under the plan in force."""

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        """`interrupted` ends a wait of the host for the other devices."""
        self.group: Group | None = None
        """The devices of the stage; None if there is only one."""
        self._interrupted = interrupted
        self._evaluation: tuple[Group | None, Callable[[], bool]] | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor in place and return it. Raises Interrupted or PeerLost."""
        if self._evaluation is not None:
            group, interrupted = self._evaluation
            assert group is not None
            group.all_reduce(tensor).wait(interrupted)
            return tensor
        assert self.group is not None
        self.group.sum_in_order(tensor, self._interrupted)
        return tensor

    def adopt(self, group: Group | None) -> None:
        """Put a plan in force, with this group of the stage's devices."""
        self.group = group

    @property
    def others(self) -> tuple[WorkerId, ...]:
        """The workers that the device may be waiting for."""
        return () if self.group is None else self.group.others

    def conclude(self) -> None:
        """Conclude the sums so far. The caller has waited for the device. Raises Interrupted if one was aborted."""
        if self.group is not None:
            self.group.conclude_in_order()

    @contextmanager
    def within(self, group: Group | None, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Sum in another group within the block, where the host waits for each sum, until `interrupted`."""
        # An evaluation reads its losses one by one, and so waits anyway.
        self._evaluation = group, interrupted
        try:
            yield
        finally:
            self._evaluation = None
