"""What one worker has of the model: whole layers, with their optimizer state, and what is committed for them.

A plan gives layers to some workers and takes them from others. What is taken is kept for a while, as it was, for it may
not have arrived where it went. The loss scale goes with the layers, for all who have some must agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from oobleck.control.protocol import PlanUpdate, Restore
from oobleck.job import JobSpec
from oobleck.planner import LayerTransfer, WorkerId
from oobleck.training.checkpoint import LayerSaver
from oobleck.training.comm import LayerState, fill_state
from oobleck.training.model import ModelStructure, Precision, Share, StageModel, initialize_share
from oobleck.training.optim import LossScale, Optimizer

from .sections import SectionSums

__all__ = ["LayerStore"]

_LOSS_SCALE = "training.loss_scale"
"""What layers' files call the numbers of `LossScale`."""


class LayerStore:
    """Mutable: changes with every plan, and every step that is applied."""

    def __init__(
        self,
        job: JobSpec,
        worker_id: WorkerId,
        *,
        whole: ModelStructure,
        share: Share,
        model: StageModel,
        optimizer: Optimizer,
        sections: SectionSums,
    ) -> None:
        """`whole` is the structure of which `share` is this device's."""
        self._job = job
        self._worker_id = worker_id
        self._whole = whole
        self._share = share
        self._structure = share.structure
        self._precision = Precision.of(job.dtype)
        self._model = model
        self._optimizer = optimizer
        self._sections = sections
        self._kept: dict[int, LayerState] = {}
        self.loss_scale: LossScale | None = LossScale(scale=job.initial_loss_scale)
        """None where others went on without this worker: it must be told before it takes part again."""

    @property
    def scale(self) -> float:
        """What the loss of the step in flight is multiplied with."""
        assert self.loss_scale is not None
        return self.loss_scale.scale if self._precision.scales_loss else 1.0

    # --- what there is of a layer --------------------------------------------------------------------------

    def state_of(self, layer: int, *, has_partial: bool) -> LayerState:
        """What travels of a layer: the optimizer's state and, if there is any, what is committed for its parameters."""
        if layer in self._kept:
            return self._kept[layer]
        names = self._structure.layer_parameters(layer)
        return self._optimizer.layer_tensors(names) + (self._sections.tensors_of(names) if has_partial else ())

    def empty_state(self, layer: int, *, has_partial: bool = False) -> LayerState:
        """Memory for a layer that is about to come."""
        shapes = [self._structure.shapes[name] for name in self._structure.layer_parameters(layer)]
        dtype, device = self._precision.parameters, self._model.device
        state = self._optimizer.empty_layer(shapes, dtype=dtype, device=device)
        return state + tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes if has_partial)

    def state_size(self, layer: int, *, has_partial: bool) -> int:
        """The elements of what travels of a layer."""
        shapes, layout = self._structure.shapes, self._optimizer.layout(self._model.device)
        counts = [shapes[name].numel() for name in self._structure.layer_parameters(layer)]
        return sum(layout.size(count) + count * has_partial for count in counts)

    def named_state(self, layer: int) -> dict[str, torch.Tensor]:
        """A layer's state as a file has it."""
        state = self._optimizer.named_state(self._structure.layer_parameters(layer))
        if self.loss_scale is not None and self._precision.scales_loss:
            state[_LOSS_SCALE] = torch.tensor(self.loss_scale.as_numbers(), dtype=torch.float64)
        return state

    # --- from one plan to the next -------------------------------------------------------------------------

    def read(self, restore: Restore, layers: range, transfers: Collection[LayerTransfer], saving: LayerSaver) -> None:
        """Read from a checkpoint what this worker is to hold or to send, but for what others send it.

        Raises CorruptCheckpoint.
        """
        received = {item.layer for item in transfers if item.target == self._worker_id}
        sent = {item.layer for item in transfers if item.source == self._worker_id}
        restored: dict[int, LayerState] = {}
        if self._precision.scales_loss:
            self.loss_scale = None
        for layer in sorted(sent | (set(layers) - received)):
            tensors = saving.load(restore, layer)
            flat = self._optimizer.flat_state(
                self._structure.layer_parameters(layer),
                tensors,
                shapes=self._structure.shapes,
                dtype=self._precision.parameters,
            )
            restored[layer] = fill_state(self.empty_state(layer), flat)
            if _LOSS_SCALE in tensors:
                self.loss_scale = LossScale.from_numbers(*tensors[_LOSS_SCALE].tolist())
        self._kept = restored

    def agree_on_loss_scale(self, sum_up: Callable[[torch.Tensor], None] | None, *, is_current: bool) -> None:
        """Tell newcomers the loss scale that the others have come to. Raises what `sum_up` raises.

        `sum_up` adds a vector up over all who train, in place; None for a spare, which is not there to hear it.
        `is_current` if this worker holds the state from which training goes on.
        """
        if not self._precision.scales_loss:
            return
        if sum_up is None:
            self.loss_scale = None
            return
        known = self.loss_scale if is_current else None
        numbers = (0.0, 0.0, 0.0, 0.0) if known is None else (*known.as_numbers(), 1.0)
        vector = torch.tensor(numbers, dtype=torch.float64)
        sum_up(vector)
        *sums, count = vector.tolist()
        self.loss_scale = (
            LossScale.from_numbers(*(total / count for total in sums))
            if count
            else LossScale(scale=self._job.initial_loss_scale)
        )

    def take(
        self, layers: range, received: Mapping[int, LayerState], *, keep: Collection[int], update: PlanUpdate
    ) -> dict[str, torch.Tensor]:
        """Hold exactly these layers: with their initial values, with what was received, or as they are here already.

        Those to `keep` are kept for others besides. Nothing is copied: what is let go does not change any more, and a
        tied parameter that stays here changes with the next step, up to which the layers are kept. Returns the
        committed sums of the held layers' parameters, received or held here, if there are any.
        """
        has_partial = bool(update.partial.microbatches)
        kept = {layer: self.state_of(layer, has_partial=has_partial) for layer in keep}
        states = {layer: state for layer, state in self._kept.items() if layer in layers} | dict(received)
        self._kept = kept
        if update.initial:  # whatever was trained is of a past that never was
            states = {}
            self._model.adopt(0, 0, {})
            self._optimizer.adopt({})
        given: dict[str, tuple[torch.Tensor, ...]] = {}
        sums = dict(self._sections.sums)
        for layer, state in sorted(states.items()):
            names = self._structure.layer_parameters(layer)
            if has_partial:
                state, partial = state[: -len(names)], state[-len(names) :]
                sums |= dict(zip(names, partial, strict=True))
            given |= self._optimizer.split_layer(names, state)
        self._model.adopt(layers.start, layers.stop, {name: tensors[0] for name, tensors in given.items()})
        self._optimizer.adopt(self._model.parameters, given)
        if update.initial and self._share.degree == 1:
            self._model.initialize(layers, seed=self._job.seed)
        elif update.initial:
            initialize_share(self._model, self._share, self._whole, layers, seed=self._job.seed)
        return {name: sums[name] for name in self._model.parameters} if has_partial else {}

    def let_go_of_kept(self) -> None:
        """All have adopted the plan: nobody will ask for the layers that it took away."""
        self._kept = {}
