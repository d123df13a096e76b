"""Collectives of the devices that share a stage, while its program runs: the sums that the modules of a model ask for,
and shares of weights and gradients.

On GPUs the host launches on and waits for none of them: an abort leaves parts of sums, and all that was computed from
them is forgotten with the step. So three things wait until the device is done, and end if a sum was aborted: the step
itself (`conclude`), sums with other stages (`Group.all_reduce`), and sections (`Group.when_whole`). Messages to other
stages need no such care, as a pipeline's communicators are given up together, before the first of them is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from oobleck.control.steps import Interrupted, PeerLost
from oobleck.planner import WorkerId

from .group import Group, Reduction


class StageSums:
    """The sums of one worker's stage, under the plan in force."""

    def __init__(
        self,
        interrupted: Callable[[], bool],
        *,
        meanwhile: Callable[[Callable[[], bool], Callable[[], bool], tuple[WorkerId, ...]], None] | None = None,
    ) -> None:
        """`interrupted` ends a wait of the host for the other devices.

        Before such a wait, `meanwhile(ready, interrupted, others)` may do what else others wait for, until `ready`.
        """
        self.group: Group | None = None
        """The devices of the stage; None if there is only one."""
        self._interrupted = interrupted
        self._meanwhile = meanwhile
        self._evaluation: tuple[Group | None, Callable[[], bool]] | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor in place and return it. Raises Interrupted or PeerLost."""
        self.join(self.post_sum(tensor))
        return tensor

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return what each device has: [devices, *own]. Raises Interrupted or PeerLost."""
        with self._posting() as group:
            rows = own.new_empty((len(group.key.members), *own.shape))
            posted = group.all_gather(rows.view(len(rows), -1), own.reshape(-1))
        self.join(posted)
        return rows

    def scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum [devices, ...] over the devices, and return this device's own row. Raises Interrupted or PeerLost."""
        with self._posting() as group:
            posted, own = group.reduce_scatter(parts)
        self.join(posted)
        return own.clone() if posted.is_waited_for else own  # without the rows of others

    def exchange(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send rows to each device, in the order of devices, and return those that all send here, in the same order.

        `counts[i][j]` says how many rows device i sends to device j. Raises Interrupted or PeerLost.
        """
        with self._posting() as group:
            posted, taken = group.all_to_all(rows, counts)
        self.join(posted)
        return taken()

    def read(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's numbers, as nested lists, once the device has them. Raises Interrupted."""
        numbers = tensor.tolist()  # an abort ends the wait, and leaves a part of them
        with self._posting() as group:
            if group.is_harmed:
                raise Interrupted
        return numbers

    def post_sum(self, tensor: torch.Tensor) -> Reduction:
        """Post a sum, in place. Raises as the sum itself."""
        with self._posting() as group:
            return group.all_reduce(tensor)

    def post_gather(self, rows: torch.Tensor, own: torch.Tensor) -> Reduction:
        """Post a copy of each device's `own` [size] into its row of all devices' `rows` [devices, size]."""
        with self._posting() as group:
            return group.all_gather(rows, own)

    def join(self, posted: Reduction) -> None:
        """Have later computation see what was posted, in the order of posts. Raises Interrupted or PeerLost."""
        if self._evaluation is not None:
            posted.wait(self._evaluation[1])
            return
        if posted.is_waited_for and self._meanwhile is not None:
            self._meanwhile(posted.is_done, self._interrupted, posted.others)
        posted.join(self._interrupted)

    @contextmanager
    def _posting(self) -> Iterator[Group]:
        group = self.group if self._evaluation is None else self._evaluation[0]
        assert group is not None
        try:
            yield group
        except (Interrupted, PeerLost):
            group.abort()
            raise

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
        """Use another group within the block, where the host waits for each collective, until `interrupted`."""
        # An evaluation reads its losses one by one, and so waits anyway.
        self._evaluation = group, interrupted
        try:
            yield
        finally:
            self._evaluation = None
