"""What the devices of a stage send each other while a model computes, in both directions of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Exchanging(Protocol):
    """Collectives of the devices of a stage."""

    def exchange(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send rows to each device, in the order of devices, and return those that all send here, in the same order.

        `counts[i][j]` says how many rows device i sends to device j.
        """


def exchanged(rows: torch.Tensor, counts: Sequence[Sequence[int]], collectives: Exchanging) -> torch.Tensor:
    """Return what `exchange` does; gradients of it return to the devices that the rows came from."""
    return _Exchange.apply(rows, counts, collectives)  # type: ignore[no-any-return,no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: Sequence[Sequence[int]], collectives: Exchanging) -> Any:
        ctx.back, ctx.collectives = [*zip(*counts, strict=True)], collectives
        return collectives.exchange(rows.contiguous(), counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.collectives.exchange(gradients[0].contiguous(), ctx.back), None, None
