"""Sharded stages: the devices of a node hold a stage together, and each keeps the state of its rows alone.

State is shares, and whole weights are a cache that follows from them (Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", SC 2020, its first stage, inside a node). A node is lost with all of its
devices, so shares within it cost no redundancy: devices of the same rank on other nodes have the same rows.

Each device computes microbatches of its own with the whole weights. `step/node_sums.py` fills the cache from the shares
of all devices, and sums their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from oobleck.errors import ConfigError

from .models import StageModel
from .structure import ModelStructure
from .tensor_parallel import Share, initialize_share, rows_of


def sharded(structure: ModelStructure, *, rank: int, degree: int) -> Share:
    """Cut the state of all trained parameters by their first dimension.

    Frozen parameters and buffers, which have no optimizer state, stay whole. So do trained single numbers, of which
    each device has a gradient of its own microbatches. Raises ConfigError for a model that is kept whole.
    """
    if structure.is_whole:
        raise ConfigError("sharding: devices cannot share out a model that is kept whole; leave it out")
    trained = {name: shape for name, shape in structure.shapes.items() if name not in structure.frozen}
    cut = {
        name: torch.Size([len(rows_of(shape[0], rank=rank, degree=degree)), *shape[1:]])
        for name, shape in trained.items()
        if shape
    }
    return Share(
        rank=rank,
        degree=degree,
        whole=structure,
        structure=replace(structure, shapes={**structure.shapes, **cut}),
        is_sharded=True,
        styles={},
        cut_dimensions=dict.fromkeys(cut, 0),
        summed=frozenset(trained.keys() - cut.keys()),
    )


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
