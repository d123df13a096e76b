"""Collectives among the devices of a node that hold a sharded stage: whole weights from shares, and sums of gradients.

Whether one is posted depends on the program alone, never on what a device finds in its cache or has done before:
otherwise devices that were interrupted at different points would wait for each other. So each program starts from
nothing, and a pass goes through its layers one by one, whichever of them the model's code calls. Waits end when the
pipeline stops, not at a fence: a whole pipeline finishes its microbatches in spite of one, which its devices may see at
different points.

| sharding | whole weights | whole gradients | sums of gradients |
|---|---|---|---|
| optimizer | during a program | until the next sum | at the end of a program, and of a section |
| gradients | during a program | of a layer | in each backward pass, layer by layer |
| all | of a layer, and the next | of a layer | the same |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from oobleck.training.comm import LARGE_SUM, Reduction

from .reduction import ABSENT, are_absent
from .stage_state import StageState


class Collectives(Protocol):
    """Those of the devices of a stage, as `StageSums` has them."""

    def post_sum(self, tensor: torch.Tensor) -> Reduction: ...
    def post_gather(self, rows: torch.Tensor, own: torch.Tensor) -> Reduction: ...
    def join(self, posted: Reduction) -> None: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter among those that are gathered or summed at once."""

    name: str
    width: int
    """The elements of a device's rows. The last devices may have fewer, and have this many all the same."""


@dataclass(frozen=True, slots=True)
class _Posted:
    run: list[_Piece]
    rows: torch.Tensor
    """[devices, elements of a device's rows]"""
    present: list[bool] | None
    """Whether this device has had a gradient of each piece; None for weights."""
    reduction: Reduction

    @property
    def is_gather(self) -> bool:
        return self.present is None


@dataclass(slots=True)
class _Pass:
    """A pass through a chunk of layers, in which each parameter is of use from one of them to another."""

    layers: Sequence[int]
    """In the order of the pass."""
    begins: Sequence[frozenset[str]]
    """The parameters that each layer is the first to use."""
    ends: Sequence[frozenset[str]]
    is_backward: bool
    at: int = -1
    """The index of the layer that the pass has reached."""

    @classmethod
    def of(cls, layers: Sequence[int], uses: Mapping[str, Sequence[int]], *, is_backward: bool) -> _Pass:
        """`uses` are the layers, of these and others, that use each parameter."""
        begins: list[set[str]] = [set() for _ in layers]
        ends: list[set[str]] = [set() for _ in layers]
        for name, used in uses.items():
            if own := [index for index, layer in enumerate(layers) if layer in used]:
                begins[own[0]].add(name)
                ends[own[-1]].add(name)
        return cls(layers, [*map(frozenset, begins)], [*map(frozenset, ends)], is_backward)


class NodeSums:
    def __init__(self, state: StageState, collectives: Collectives, *, max_elements: int = LARGE_SUM) -> None:
        """`max_elements` limits what is gathered or summed at once, unless a single parameter has more."""
        self._state = state
        self._rank, self._degree = state.share.rank, state.share.degree
        self._collectives = collectives
        self._max_elements = max_elements
        self._frees_weights = state.share.sharding == "all"
        self._sums_in_passes = state.share.sums_in_passes
        self._whole: set[str] = set()
        """The parameters whose whole weights are here; with `all`, those of a layer or two."""
        self._posted: deque[_Posted] = deque()
        """Gathers and sums under way, which are joined in this order."""
        self._pass: _Pass | None = None
        for layer in range(state.model.structure.num_layers) if self._sums_in_passes else ():
            for module in state.model.modules_of(layer):
                module.register_forward_pre_hook(self._entering(layer), with_kwargs=True)

    def casting(self) -> AbstractContextManager[object]:
        """Within the block, which runs a program, autocast casts each weight once where passes have no sums."""
        # A cast that several passes share is older than all that the later ones record, so autograd goes on from it
        # last: a layer's gradients would come after the sum of them.
        return nullcontext() if self._sums_in_passes else self._state.model.casting_once()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a program. Raises Interrupted or PeerLost."""
        self._posted, self._pass = deque(), None
        if self._frees_weights:
            self._drop(self._whole)
            return
        for run in self._runs_by_type(self._state.wholes.keys()):
            self._gather(run)
            self._join(but=1)
        self._join()

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Have whole weights in the block, which runs the forward pass of a microbatch through a chunk of layers."""
        with self._passing(tuple(self._state.model.chunks[chunk]), is_backward=False):
            yield

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """As `forward`, for the backward pass; afterwards sums of its gradients are under way, if passes have sums."""
        with self._passing(tuple(reversed(self._state.model.chunks[chunk])), is_backward=True):
            yield

    @torch.no_grad()
    def conclude(self) -> None:
        """Add all sums of devices' gradients so far to those of the own shares, and drop the whole gradients.

        Raises Interrupted or PeerLost; gradients are then partial.
        """
        for run in () if self._sums_in_passes else self._runs(self._trained(self._state.wholes.keys())):
            self._sum(run)
            self._join(but=1)
        self._join()

    # --- passes --------------------------------------------------------------------------------------------

    @contextmanager
    def _passing(self, layers: Sequence[int], *, is_backward: bool) -> Iterator[None]:
        if not self._sums_in_passes:
            yield
            return
        layers_with, names = self._state.share.whole.layers_with, self._state.wholes
        self._pass = _Pass.of(layers, {name: layers_with(name) for name in names}, is_backward=is_backward)
        if self._frees_weights:
            # The layer where the pass before ended may be the first of this one.
            self._drop(self._whole - self._pass.begins[0])
            self._gather_for(0)
        self._reach(0)
        yield
        self._reach(len(layers) - 1)
        self._leave(self._pass)
        self._pass = None

    @torch.no_grad()
    def _reach(self, index: int) -> None:
        """Leave the layers of the pass before this one, and have its weights."""
        current = self._pass
        assert current is not None
        while current.at < index:
            if current.at >= 0:
                self._leave(current)
                if self._frees_weights:
                    self._drop(current.ends[current.at])
            current.at += 1
            while any(posted.is_gather for posted in self._posted):
                self._join_first()
            if self._frees_weights:
                self._gather_for(current.at + 1)

    @torch.no_grad()
    def _leave(self, current: _Pass) -> None:
        """Post sums of the gradients of the layer that the pass has reached."""
        if not current.is_backward:
            return
        # One layer's at a time, as what is under way takes memory.
        while any(not posted.is_gather for posted in self._posted):
            self._join_first()
        for run in self._runs(self._trained(current.ends[current.at])):
            self._sum(run)

    def _entering(self, layer: int) -> Callable[..., None]:
        """Make the hook of a module of a layer."""

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current = self._pass
            if current is None or current.is_backward or self._state.model.is_tried:
                return
            index = current.layers.index(layer)
            if current.at >= index:
                return
            before = current.layers[current.at]
            self._reach(index)
            hidden = args[0] if args else next(iter(kwargs.values()))
            if hidden.requires_grad:
                # Autograd runs what was recorded later first: it reaches this tensor when the layer is done.
                hidden.register_hook(lambda _gradient: self._come_back(before))

        return enter

    def _come_back(self, layer: int) -> None:
        """The backward pass goes on with a layer."""
        assert self._pass is not None
        self._reach(self._pass.layers.index(layer))

    # --- weights -------------------------------------------------------------------------------------------

    def _gather_for(self, index: int) -> None:
        """Post gathers of the weights that a layer of the pass is the first to use, if there is such a layer."""
        assert self._pass is not None
        if index < len(self._pass.begins):
            for run in self._runs_by_type(self._pass.begins[index] - self._whole):
                self._gather(run)

    def _gather(self, run: list[_Piece]) -> None:
        shares, dtype = self._state.parameters, self._state.wholes[run[0].name].dtype
        own = torch.cat([_padded(shares[each.name].detach(), each.width) for each in run]).to(dtype)
        rows = own.new_empty((self._degree, own.numel()))
        self._posted.append(_Posted(run, rows, None, self._collectives.post_gather(rows, own)))

    def _fill(self, posted: _Posted) -> None:
        """Make whole what was gathered."""
        pieces = torch.split(posted.rows, [each.width for each in posted.run], dim=1)
        for each, piece in zip(posted.run, pieces, strict=True):
            # Not the parameter itself: autograd would take what it keeps of it for changed.
            whole = self._state.wholes[each.name].data
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            whole.view(-1).copy_(piece.reshape(-1)[: whole.numel()])
            self._whole.add(each.name)

    def _drop(self, names: Collection[str]) -> None:
        for name in self._state.wholes.keys() & names:
            # What autograd keeps of a weight has the same memory, which it finds filled again.
            self._state.wholes[name].untyped_storage().resize_(0)
        self._whole -= set(names)

    # --- gradients -----------------------------------------------------------------------------------------

    def _trained(self, names: Collection[str]) -> Collection[str]:
        return {name for name in names if self._state.wholes[name].requires_grad}

    def _sum(self, run: list[_Piece]) -> None:
        """Post the sum of whole gradients, and drop these."""
        wholes = [self._state.wholes[each.name] for each in run]
        present = [whole.grad is not None for whole in wholes]
        rows = torch.cat([self._rows(whole, each.width) for whole, each in zip(wholes, run, strict=True)], dim=1)
        # Each device's own rows say by their first number whether there is a gradient (`reduction.py`).
        starts = torch.tensor([0, *(each.width for each in run[:-1])]).cumsum(0)[present].to(rows.device)
        rows[:, starts] += 0.0
        for whole in wholes:
            whole.grad = None
        self._posted.append(_Posted(run, rows, present, self._collectives.post_sum(rows)))

    def _add(self, run: list[_Piece], rows: torch.Tensor, present: list[bool]) -> None:
        """Add what is here of sums to the gradients of the own shares."""
        shares, pieces = self._state.parameters, torch.split(rows[self._rank], [each.width for each in run])
        # Copies, as the rows of the other devices are of no use any more.
        own = {
            each.name: piece[: shares[each.name].numel()].view_as(shares[each.name]).clone()
            for each, piece in zip(run, pieces, strict=True)
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

    def _rows(self, whole: nn.Parameter, width: int) -> torch.Tensor:
        gradient = torch.full_like(whole, ABSENT) if whole.grad is None else whole.grad
        return _padded(gradient.to(self._state.model.dtype), self._degree * width).view(self._degree, width)

    # --- what is under way ---------------------------------------------------------------------------------

    def _join(self, *, but: int = 0) -> None:
        """Put to use what was posted, except for the last `but`."""
        while len(self._posted) > but:
            self._join_first()

    def _join_first(self) -> None:
        posted = self._posted.popleft()
        self._collectives.join(posted.reduction)
        if posted.present is None:
            self._fill(posted)
        else:
            self._add(posted.run, posted.rows, posted.present)

    # --- runs ----------------------------------------------------------------------------------------------

    def _runs_by_type(self, names: Collection[str]) -> Iterator[list[_Piece]]:
        wholes = self._state.wholes
        for dtype in dict.fromkeys(whole.dtype for name, whole in wholes.items() if name in names):
            yield from self._runs({name for name in names if wholes[name].dtype == dtype})

    def _runs(self, names: Collection[str]) -> Iterator[list[_Piece]]:
        """Cut parameters into runs of at most `max_elements`, alike on all devices."""
        run: list[_Piece] = []
        size = 0
        for name, whole in self._state.wholes.items():
            if name not in names:
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
