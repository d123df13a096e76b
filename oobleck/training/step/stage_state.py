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
        self._parameters: dict[str, nn.Parameter] = {}
        """The shares of held parameters, and those that stay whole; unused where the model's own are the state."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The state's parameters, by canonical name, in the order of layers."""
        return dict(self._parameters) if self.share.is_sharded else self.model.parameters

    def adopt_chunks(self, chunks: Sequence[range], state: Mapping[str, torch.Tensor]) -> None:
        """Hold the layers of these chunks from now on, as `StageModel.adopt_chunks` does, with shares as `state`.

        Whole weights of new layers are not-a-number until the cache is filled.
        """
        share, before = self.share, self._parameters
        if not share.is_sharded:
            self.model.adopt_chunks(chunks, state)
            return
        cut = share.cut_dimensions.keys()
        self.model.adopt_chunks(chunks, {name: value for name, value in state.items() if name not in cut})
        self._parameters = {}
        for name, whole in self.model.parameters.items():
            if name not in cut:
                self._parameters[name] = whole
            # As in the model, what is held already stays the same object.
            elif name in before:
                self._parameters[name] = before[name]
            else:
                self._parameters[name] = self._new_share(name, state.get(name), whole)

    def initialize(self, layers: Iterable[int], *, seed: int) -> None:
        """Set held layers to their share of the initial values."""
        layers = tuple(layers)
        if self.share.degree > 1 and not self.share.is_sharded:
            initialize_share(self.model, self.share, self.share.whole, layers, seed=seed)
            return
        self.model.initialize(layers, seed=seed)
        with torch.no_grad():
            for name in self.share.cut_dimensions.keys() & self._parameters.keys():
                self._parameters[name].copy_(self.share.part_of(name, self.model.parameters[name]))

    def forget_gradients(self) -> None:
        for parameter in (*self.model.parameters.values(), *self._parameters.values()):
            parameter.grad = None

    def _new_share(self, name: str, value: torch.Tensor | None, whole: nn.Parameter) -> nn.Parameter:
        if value is None:
            value = torch.full(self.share.structure.shapes[name], torch.nan, dtype=whole.dtype, device=whole.device)
        made = nn.Parameter(value.detach().to(device=whole.device, dtype=whole.dtype))
        # An optimizer of a script's may go by what the script has set.
        vars(made).update(vars(whole))
        return made
