"""Collectives among the devices of a node that hold a sharded stage: whole weights from shares, and sums of gradients.

Whether one is posted depends on the program alone, never on what a device finds in its cache or has done before:
otherwise devices that were interrupted at different points would wait for each other. So each program begins with
`gather`, and ends, as each of its sections does, with `scatter`. Their waits end when the pipeline stops, not at a
fence: a whole pipeline finishes its microbatches in spite of one, which its devices may see at different points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from oobleck.training.comm import LARGE_SUM
from oobleck.training.model import AllReduce

from .reduction import ABSENT, are_absent
from .stage_state import StageState


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter among those that are summed at once."""

    name: str
    width: int
    """The elements of a device's rows. The last devices may have fewer, and have this many all the same."""


class NodeSums:
    def __init__(self, state: StageState, sum_up: AllReduce, *, max_elements: int = LARGE_SUM) -> None:
        """`sum_up` sums over the devices of the stage, in place; `max_elements` limits what is summed at once, unless a
        single parameter has more."""
        self._state = state
        self._rank, self._degree = state.share.rank, state.share.degree
        self._sum_up = sum_up
        self._max_elements = max_elements

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the model's whole weights from the shares of all devices. Raises Interrupted or PeerLost."""
        shares, wholes = self._state.parameters, self._state.model.parameters
        for run in self._runs(wholes):
            own = torch.cat([_padded(shares[each.name], each.width) for each in run])
            # Everywhere else -0.0, to which adding a number changes none of its bits: the sum is what all have.
            rows = torch.full((self._degree, own.numel()), ABSENT, dtype=own.dtype, device=own.device)
            rows[self._rank] = own
            self._sum_up(rows)
            for each, piece in zip(run, torch.split(rows, [each.width for each in run], dim=1), strict=True):
                whole = wholes[each.name].view(-1)
                whole.copy_(piece.reshape(-1)[: whole.numel()])

    @torch.no_grad()
    def scatter(self) -> None:
        """Add the sums of all devices' gradients to those of the own shares, and drop the whole gradients.

        Raises Interrupted or PeerLost; gradients are then partial.
        """
        wholes = self._state.model.parameters
        for run in self._runs(wholes):
            rows = torch.cat([self._rows_of_gradient(wholes[each.name], each.width) for each in run], dim=1)
            # Each device's own rows say by their first number whether there is a gradient (`reduction.py`).
            present = [wholes[each.name].grad is not None for each in run]
            starts = torch.tensor([0, *(each.width for each in run[:-1])]).cumsum(0)[present].to(rows.device)
            rows[:, starts] += 0.0
            self._sum_up(rows)
            # Copies, as the rows of the other devices are of no use any more.
            self._add(
                run, [piece.clone() for piece in torch.split(rows[self._rank], [each.width for each in run])], present
            )
            for each in run:
                wholes[each.name].grad = None

    def _add(self, run: list[_Piece], sums: Sequence[torch.Tensor], present: list[bool]) -> None:
        """Add what is here of the sums to the gradients of the own shares."""
        shares = self._state.parameters
        own = {
            each.name: piece[: shares[each.name].numel()].view_as(shares[each.name])
            for each, piece in zip(run, sums, strict=True)
        }
        # The host reads from the device only where this one has no gradient, and others may have one.
        doubtful = [
            each.name for each, is_here in zip(run, present, strict=True) if not is_here and own[each.name].numel()
        ]
        absent = set()
        if doubtful:
            flags = are_absent([own[name] for name in doubtful])
            absent = {name for name, is_absent in zip(doubtful, flags, strict=True) if is_absent}
        for name, gradient in own.items():
            if name not in absent:
                known = shares[name].grad
                shares[name].grad = gradient if known is None else known.add_(gradient)

    def _rows_of_gradient(self, whole: nn.Parameter, width: int) -> torch.Tensor:
        gradient = torch.full_like(whole, ABSENT) if whole.grad is None else whole.grad
        return _padded(gradient, self._degree * width).view(self._degree, width)

    def _runs(self, wholes: Mapping[str, nn.Parameter]) -> Iterator[list[_Piece]]:
        """Cut the parameters that devices share into runs of at most `max_elements`, alike on all devices."""
        run: list[_Piece] = []
        size = 0
        for name, whole in wholes.items():
            if name not in self._state.share.cut_dimensions or not whole.numel():
                continue
            count = whole.shape[0]
            width = -(-count // self._degree) * (whole.numel() // count)
            if run and size + self._degree * width > self._max_elements:
                yield run
                run, size = [], 0
            run.append(_Piece(name, width))
            size += self._degree * width
        if run:
            yield run


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat if flat.numel() == size else functional.pad(flat, (0, size - flat.numel()))
