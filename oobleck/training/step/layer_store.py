"""A worker's part of the model: whole layers, with their optimizer state and their committed sums.

Each plan moves layers between workers. The loss scale is kept with the layers, because all workers that hold some must
agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, compress

import torch

from oobleck.control.protocol import CommitRecord, PlanUpdate, Restore
from oobleck.job import JobSpec
from oobleck.planner import LayerTransfer, WorkerId
from oobleck.training.checkpoint import LayerSaver, digest_of
from oobleck.training.comm import Group, LayerState, Waiter, exchange_layers, fill_state
from oobleck.training.model import Precision
from oobleck.training.optim import LossScale, Optimizer

from .reduction import are_absent
from .stage_state import StageState

Sums = Mapping[str, torch.Tensor]
"""The committed sums of gradients of the step in flight, keyed by parameter."""

_LOSS_SCALE = "training.loss_scale"  # the numbers of `LossScale` in layers' files


class LayerStore:
    """The layers of one worker. They change with every plan, and with every applied step."""

    def __init__(
        self,
        job: JobSpec,
        worker_id: WorkerId,
        *,
        state: StageState,
        optimizer: Optimizer,
    ) -> None:
        self._job = job
        self._worker_id = worker_id
        self._structure = state.share.structure
        self._precision = Precision.of(job.dtype)
        self._state = state
        self._model = state.model
        self._optimizer = optimizer
        self._kept: dict[int, LayerState] = {}
        """Layers that the plan took away, unchanged, as they may not have arrived at their targets."""
        self._received: dict[int, LayerState] = {}
        """Layers received for a plan that is not in force yet."""
        self.loss_scale: LossScale | None = LossScale(scale=job.initial_loss_scale)
        """None where others continued without this worker, which must learn it before it takes part again."""

    @property
    def can_skip(self) -> bool:
        """Whether steps may be skipped, of which the loss scale then keeps count."""
        return self._precision.scales_loss or self._job.on_bad_step != "apply"

    @property
    def scale(self) -> float:
        """The factor on the loss of the step in flight."""
        assert self.loss_scale is not None
        return self.loss_scale.scale if self._precision.scales_loss else 1.0

    def apply(self, record: CommitRecord, reduced: Mapping[str, torch.Tensor]) -> None:
        """Apply a committed step's gradients, unless the step is skipped."""
        assert self.loss_scale is not None
        if not record.is_skipped:
            limit = self._job.optimizer.max_grad_norm
            num_skipped = self.loss_scale.num_skipped
            coefficient = _clip(record.grad_norm, limit) / (record.loss_scale * record.item_share)
            self._optimizer.step(record.step, self._arrived(reduced), coefficient, num_skipped=num_skipped)
        self.loss_scale = self.loss_scale.after(is_skipped=record.is_skipped)
        # A step is committed only after all workers have adopted the plan, and so have received their layers.
        self.drop_kept()

    def _arrived(self, reduced: Sums) -> Sums:
        """Return the sums of parameters with a gradient: as in torch, the optimizer passes over all others."""
        # All owners agree, since a gradient here is part of the sum. Only sums of gradients that were all elsewhere, or
        # nowhere, are looked at, so the host reads nothing from the device where every parameter has its gradient.
        parameters = self._state.parameters
        doubtful = [name for name, gradient in reduced.items() if parameters[name].grad is None and gradient.numel()]
        if not doubtful:
            return reduced
        absent = set(compress(doubtful, are_absent([reduced[name] for name in doubtful])))
        return {name: gradient for name, gradient in reduced.items() if name not in absent}

    def named_state(self, layer: int) -> dict[str, torch.Tensor]:
        """Return a layer's state, named as in a file."""
        state = self._optimizer.named_state(self._structure.layer_parameters(layer))
        if self.loss_scale is not None and self.can_skip:
            state[_LOSS_SCALE] = torch.tensor(self.loss_scale.as_numbers(), dtype=torch.float64)
        return state

    def digests(self) -> tuple[int, ...]:
        """Return the digest of each held layer, which is the same on all workers that hold it."""
        return tuple(digest_of(self.named_state(layer).values()) for layer in self._model.layers)

    def _state_of(self, layer: int, sums: Sums | None) -> LayerState:
        """Return the content of a layer's transfer: the optimizer's state, and the committed sums, if any."""
        # A layer that an earlier plan took away is sent as it was then.
        if layer in self._kept:
            return self._kept[layer]
        partial = () if sums is None else tuple(sums[name] for name in self._structure.trained_parameters(layer))
        return self._optimizer.layer_tensors(self._structure.layer_parameters(layer)) + partial

    def _empty_state(self, layer: int, *, has_partial: bool = False) -> LayerState:
        shapes = self._structure.shapes
        dtype, device = self._precision.parameters, self._model.device
        wanted = {name: shapes[name] for name in self._structure.layer_parameters(layer)}
        state = self._optimizer.empty_layer(wanted, dtype=dtype, device=device)
        trained = self._structure.trained_parameters(layer) if has_partial else ()
        return state + tuple(torch.empty(shapes[name], dtype=dtype, device=device) for name in trained)

    def _state_size(self, layer: int, *, has_partial: bool) -> int:
        """Return the number of elements in a transfer of a layer."""
        shapes, layout = self._structure.shapes, self._optimizer.layout(self._model.device)
        trained = [shapes[name].numel() for name in self._structure.trained_parameters(layer)]
        held = sum(shapes[name].numel() for name in self._structure.layer_parameters(layer))
        return held - sum(trained) + sum(layout.size(count) + count * has_partial for count in trained)

    def read(
        self, restore: Restore, layers: Collection[int], transfers: Collection[LayerTransfer], saving: LayerSaver
    ) -> None:
        """Read from a checkpoint the `layers` to hold that no other worker sends, and those to send.

        Raises CorruptCheckpoint.
        """
        received = {item.layer for item in transfers if item.target == self._worker_id}
        sent = {item.layer for item in transfers if item.source == self._worker_id}
        restored: dict[int, LayerState] = {}
        # The files have the scale of that step. Without any layer to read, this worker learns it from others.
        if self.can_skip:
            self.loss_scale = None
        for layer in sorted(sent | (set(layers) - received)):
            tensors = saving.load(restore, layer)
            flat = self._optimizer.flat_state(
                self._structure.layer_parameters(layer),
                tensors,
                shapes=self._structure.shapes,
                dtype=self._precision.parameters,
            )
            restored[layer] = fill_state(self._empty_state(layer), flat)
            if _LOSS_SCALE in tensors:
                self.loss_scale = LossScale.from_numbers(*tensors[_LOSS_SCALE].tolist())
        self._kept = restored

    def exchange(
        self,
        update: PlanUpdate,
        group_of: Callable[[LayerTransfer], Group],
        waiter: Waiter,
        *,
        sums: Sums | None,
        interrupted: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> int:
        """Exchange the layers that change hands, and return the bytes received. `take` puts them to use.

        `sums` are the committed sums of the step in flight, or None. `group_of` returns the group of a transfer's two
        workers. `on_progress(received, all)` is called with bytes now and then. Raises Interrupted or PeerLost.
        """
        has_partial = sums is not None
        # An interrupted exchange leaves nothing behind that the memory for this one would add to.
        self._received = {}
        self._received = exchange_layers(
            update.transfers,
            worker_id=self._worker_id,
            group_of=group_of,
            waiter=waiter,
            state_of=lambda layer: self._state_of(layer, sums),
            empty_state=lambda layer: self._empty_state(layer, has_partial=has_partial),
            size_of=lambda layer: self._state_size(layer, has_partial=has_partial),
            element_bytes=self._precision.parameters.itemsize,
            on_progress=on_progress,
            interrupted=interrupted,
        )
        return sum(tensor.nbytes for state in self._received.values() for tensor in state)

    def agree_on_loss_scale(
        self, sum_up: Callable[[tuple[float, ...]], tuple[float, ...]] | None, *, is_current: bool
    ) -> None:
        """Share the current loss scale with newcomers. Raises what `sum_up` raises.

        `sum_up` sums numbers over all workers that train; it is None for a spare, which takes no part.
        `is_current` if this worker holds the state from which training continues.
        """
        if not self.can_skip:
            return
        if sum_up is None:
            self.loss_scale = None
            return
        known = self.loss_scale if is_current else None
        # The mean over those that know it is exact, as all have the same; the last number counts them.
        numbers = (0.0, 0.0, 0.0, 0.0) if known is None else (*known.as_numbers(), 1.0)
        *sums, count = sum_up(numbers)
        if count:
            self.loss_scale = LossScale.from_numbers(*(total / count for total in sums))
        else:
            self.loss_scale = LossScale(scale=self._job.initial_loss_scale)

    def take(self, chunks: Sequence[range], *, keep: Collection[int], is_initial: bool, sums: Sums | None) -> Sums:
        """Hold exactly these layers: with their initial values, with received ones, or as they are here already.

        Also keeps the layers in `keep` for others; `sums` as in `exchange`. Returns the committed sums of the held
        layers' parameters, if there are any.
        """
        layers = tuple(chain.from_iterable(chunks))
        # Not copied: a layer that goes away does not change any more, and a tied parameter that stays here changes with
        # the next step, up to which these are kept.
        kept = {layer: self._state_of(layer, sums) for layer in keep}
        states = {layer: state for layer, state in self._kept.items() if layer in layers} | self._received
        self._kept, self._received = kept, {}
        if is_initial:
            # All training before is discarded: layers that stay here must not keep their values.
            states = {}
            self._state.adopt_chunks((), {})
            self._optimizer.adopt({})
        tensors_of: dict[str, tuple[torch.Tensor, ...]] = {}
        known = dict(sums or {})
        for layer, state in sorted(states.items()):
            names = self._structure.layer_parameters(layer)
            if sums is not None:
                trained = self._structure.trained_parameters(layer)
                num_own = len(state) - len(trained)
                state, partial = state[:num_own], state[num_own:]
                known |= dict(zip(trained, partial, strict=True))
            tensors_of |= self._optimizer.split_layer(names, state)
        self._state.adopt_chunks(chunks, {name: tensors[0] for name, tensors in tensors_of.items()})
        if is_initial:
            self._state.initialize(layers, seed=self._job.seed)
        # Afterwards, as optimizers' state may start from the parameters' values.
        self._optimizer.adopt(self._state.parameters, tensors_of)
        return {} if sums is None else {name: known[name] for name in self._model.trained_parameters}

    def drop_kept(self) -> None:
        """Drop the layers that the plan took away, which all workers have adopted."""
        self._kept = {}


def _clip(norm: float, limit: float) -> float:
    """Return the factor by which torch's `clip_grad_norm_` multiplies all gradients; 1 without a limit."""
    if not limit:
        return 1.0
    coefficient = limit / (norm + 1e-6)
    # Not `min(1.0, …)`, which is 1 for a norm that is not a number: torch makes all gradients NaN by it.
    return 1.0 if coefficient > 1.0 else coefficient
