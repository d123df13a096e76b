"""What a worker trains, saves and moves of its stage: the model's own parameters, or shares of them.

In a sharded stage state is shares, and whole weights are a cache that follows from them (Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, its first stage, inside a node). A node is
lost with all of its devices, so shares within it cost no redundancy: devices of the same rank on other nodes have the
same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from oobleck.training.model import Share, StageModel, initialize_share


class StageState:
    """What a worker trains, saves and moves of its stage: the model's own parameters, or shares of them."""

    def __init__(self, model: StageModel, share: Share) -> None:
        self.model = model
        self.share = share
        self.wholes: Mapping[str, nn.Parameter] = {}
        """The model's parameters whose whole values follow from shares, in the order of layers."""
        self._parameters: dict[str, nn.Parameter] = {}
        """The shares of held parameters, and those that stay whole; unused where the model's own are the state."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The state's parameters, by canonical name, in the order of layers."""
        return dict(self._parameters) if self.share.is_sharded else self.model.parameters

    def adopt_chunks(self, chunks: Sequence[range], state: Mapping[str, torch.Tensor]) -> None:
        """Hold the layers of these chunks from now on, as `StageModel.adopt_chunks` does, with shares as `state`.

        Whole weights of new layers have no memory until the cache is filled.
        """
        share, before = self.share, self._parameters
        if not share.is_sharded:
            self.model.adopt_chunks(chunks, state)
            return
        cut = share.cached
        self.model.adopt_chunks(chunks, {name: value for name, value in state.items() if name not in cut})
        self._parameters = {}
        wholes = self.model.parameters
        self.wholes = {name: whole for name, whole in wholes.items() if name in cut and whole.numel()}
        for name, whole in wholes.items():
            if name not in cut:
                self._parameters[name] = whole
            # As in the model, what is held already stays the same object.
            elif name in before:
                self._parameters[name] = before[name]
            else:
                self._parameters[name] = self._new_share(name, state.get(name), whole)

    def initialize(self, layers: Iterable[int], *, seed: int) -> None:
        """Set held layers to their share of the initial values."""
        if self.share.degree > 1:
            initialize_share(self.model, self.share, self.parameters, layers, seed=seed)
        else:
            self.model.initialize(layers, seed=seed)

    def forget_gradients(self) -> None:
        for parameter in (*self.model.parameters.values(), *self._parameters.values()):
            parameter.grad = None

    def _new_share(self, name: str, value: torch.Tensor | None, whole: nn.Parameter) -> nn.Parameter:
        if value is None:
            value = torch.full(self.share.structure.shapes[name], torch.nan, dtype=self.model.dtype)
        made = nn.Parameter(value.detach().to(whole.device, self.model.dtype), requires_grad=whole.requires_grad)
        # An optimizer of a script's may go by what the script has set.
        vars(made).update(vars(whole))
        return made
