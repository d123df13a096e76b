"""Persistent buffers of a stage: state of their layers, which modules read in the model's own types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError, CorruptCheckpoint

from .brought import changed_buffer
from .layered_model import SplittableModel
from .structure import ModelStructure, Site


@dataclass(frozen=True, slots=True)
class _Plugged:
    name: str
    module: nn.Module
    attribute: str
    value: torch.Tensor
    """The tensor that the module reads: the state itself, or a copy in the buffer's own type."""
    state: torch.Tensor


class StageBuffers:
    """The persistent buffers of a model's modules; those of layers held elsewhere have their initial values."""

    def __init__(self, model: SplittableModel, modules: Mapping[str, nn.Module], structure: ModelStructure) -> None:
        """`modules` are all of the model's, keyed by name, with the buffers' initial values.

        Raises ConfigError if the files of weights cannot supply buffers that every stage computes with.
        """
        self._modules = modules
        self._everywhere = structure.buffers_everywhere
        sites = [site for layer in structure.sites for site in layer if site.is_buffer]
        if structure.weights is not None and self._everywhere:
            # Each stage reads these, whichever layers it holds: their modules run on every stage.
            named_for: Any = model  # only transformers' own models have files that it wrote
            known = structure.weights.known(self._everywhere, named_for, renamed=True)
            values = structure.weights.read(known, named_for, structure.shapes)
            for site in sites:
                if site.name in values:
                    first = self._place(site)[site.attribute]
                    self._place(site)[site.attribute] = values[site.name].to(first.device, first.dtype)
        self._first = {site.name: self._place(site)[site.attribute] for site in sites}
        self._plugged: dict[tuple[int, str], _Plugged] = {}
        # Modules may be shared, so a buffer may have several names.

    @torch.no_grad()
    def begin(self, sites: Iterable[Site], parameters: Mapping[str, torch.Tensor]) -> None:
        """Set buffers to their initial values. Raises ConfigError for values that the stage's type cannot hold."""
        for site in sites:
            if not site.is_buffer:
                continue
            first, state = self._first[site.name], parameters[site.parameter]
            state.copy_(first)
            if not torch.equal(state.to(first.dtype), first):
                raise ConfigError(
                    f"model: the buffer {site.name} is of {first.dtype}, and has values that {state.dtype} "
                    "cannot hold, in which layers travel; register it with persistent=False"
                )

    def plug(self, site: Site, state: torch.Tensor) -> None:
        buffers, first = self._place(site), self._first[site.name]
        value = state.detach() if state.dtype == first.dtype else state.detach().to(first.dtype)
        buffers[site.attribute] = value
        module = self._modules[site.module]
        self._plugged[id(module), site.attribute] = _Plugged(site.name, module, site.attribute, value, state)

    def unplug(self, site: Site) -> None:
        self._place(site)[site.attribute] = self._first[site.name]
        self._plugged.pop((id(self._modules[site.module]), site.attribute), None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, a forward pass may run. Raises ConfigError that names a buffer which it changed."""
        for each in self._plugged.values():
            # The state may have been received or loaded since the last pass.
            if each.value.dtype != each.state.dtype:
                each.value.copy_(each.state.detach())
        versions = {key: each.value._version for key, each in self._plugged.items()}
        yield
        for key, each in self._plugged.items():
            # Microbatches are spread over nodes, and may be assigned again after a failure, so replicas of a buffer
            # that passes change would not stay equal to the last bit.
            if each.module._buffers.get(each.attribute) is not each.value or each.value._version != versions[key]:
                raise changed_buffer(each.name)

    def require_known(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise CorruptCheckpoint if `state` has other values for buffers that every stage computes with."""
        for name in sorted(self._everywhere & state.keys()):
            first = self._first[name]
            if not torch.equal(state[name].to(first.device, first.dtype), first):
                raise CorruptCheckpoint(
                    f"the buffer {name}, which every stage computes with, has other values than the model that the "
                    "job names; give the model that was trained as model.path"
                )

    def _place(self, site: Site) -> dict[str, torch.Tensor]:
        buffers: dict[str, torch.Tensor] = self._modules[site.module]._buffers  # type: ignore[assignment]
        return buffers
