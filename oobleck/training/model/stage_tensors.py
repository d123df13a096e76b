"""The tensors of a stage: parameters of held layers in their modules, and persistent buffers beside them.

Parameters of layers that other workers hold have no memory. Persistent buffers are state of their layers, which modules
read in the model's own types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from oobleck.errors import ConfigError, CorruptCheckpoint

from .brought import changed_buffer, full_name
from .configuration import CLASSIFICATION
from .initialization import initialize_adapters, initialize_module, unset
from .layered_model import SplittableModel
from .live_model import LiveWeights
from .structure import ModelStructure, Site
from .weights import WeightFiles


class StageTensors:
    """The parameters of the layers that a stage holds; none at first."""

    def __init__(
        self,
        model: SplittableModel,
        modules: Mapping[str, nn.Module],
        structure: ModelStructure,
        *,
        vacant: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        cached: Mapping[str, torch.dtype],
    ) -> None:
        """`modules` are all of the model's, keyed by name, with the buffers' initial values.

        Parameters are those in `vacant` where their layers are held elsewhere. Those in `cached` are of its types, and
        have no memory unless others give it to them. Raises ConfigError as `_StageBuffers` does.
        """
        self._model = model
        self._modules = modules
        self._structure = structure
        self._vacant = vacant
        self._dtype = dtype
        self._device = device
        self._cached = cached
        self._buffers = _StageBuffers(model, modules, structure)
        self._layers: tuple[int, ...] = ()
        self.parameters: dict[str, nn.Parameter] = {}
        """By canonical name, in the order of layers; a tied one once."""

    def hold(self, layers: Sequence[int], state: Mapping[str, torch.Tensor]) -> None:
        """Hold these layers from now on, as `StageModel.adopt_chunks` says."""
        for layer in self._layers:
            self._unplug(self._structure.sites[layer])
        self._layers = tuple(layers)
        held: dict[str, nn.Parameter] = {}
        for layer in layers:
            for name in self._structure.layer_parameters(layer):
                if name not in held:
                    kept = self.parameters.get(name)
                    held[name] = self._new_parameter(name, state.get(name)) if kept is None else kept
        self._buffers.require_known(state)
        self.parameters = held
        for layer in layers:
            self._plug(self._structure.sites[layer])

    def buffers_in_use(self) -> AbstractContextManager[None]:
        """Within the block, a forward pass may run. Raises ConfigError that names a buffer which it changed."""
        return self._buffers.in_use()

    def initialize(self, layers: Iterable[int], *, seed: int) -> None:
        """Set the parameters of held layers to their initial values.

        They are read from the model's files of weights. Without files, and for a classification head that the files
        lack, they follow the model's own distributions and depend on (seed, their names) alone: any cut and any device
        give the same bits.
        """
        for layer in layers:
            assert layer in self._layers, f"layer {layer} is not held: {self._layers}"
            # First, because files of weights may lack buffers, which then keep these values.
            self.start_buffers([layer])
            if self._structure.weights is None or self._may_lack(layer):
                self._initialize_layer(layer, seed=seed)
            # The files have every parameter but those of adapters, which start from the seed.
            elif self._structure.adapters is not None and not self._structure.weights.is_whole:
                for root in self._structure.layer_roots(layer):
                    initialize_adapters(self._model, self._modules[root], root, seed=seed)
            if self._structure.weights is not None:
                self._read_layer(layer, self._structure.weights)
            for name in self._structure.layer_parameters(layer):
                # New parameters are not-a-number (`unset`) until a rule or a file sets them.
                if self.parameters[name].isnan().any():
                    raise ConfigError(f"model: its own rules for initialization leave {name} without a value")

    def start_buffers(self, layers: Iterable[int]) -> None:
        """Set the persistent buffers of held layers to their initial values."""
        for layer in layers:
            self._buffers.begin(self._structure.sites[layer], self.parameters)

    def _new_parameter(self, name: str, value: torch.Tensor | None) -> nn.Parameter:
        shape, dtype = self._structure.shapes[name], self._dtype
        if name in self._cached:
            dtype = self._cached[name]
            value = torch.empty(shape, dtype=dtype, device=self._device)
            value.untyped_storage().resize_(0)
        elif value is None:
            value = unset(shape, dtype=dtype, device=self._device)
        assert value.shape == shape, f"{name} has the shape {tuple(shape)}, not {tuple(value.shape)}"
        is_trained = name not in self._structure.frozen
        made = nn.Parameter(value.detach().to(device=self._device, dtype=dtype), requires_grad=is_trained)
        if name in self._vacant:  # it is not a buffer
            vars(made).update(vars(self._vacant[name]))
        for hook in self._structure.hooks.get(name, ()):
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    def _plug(self, sites: Iterable[Site]) -> None:
        for site in sites:
            if site.is_buffer:
                self._buffers.plug(site, self.parameters[site.parameter])
            else:
                self._modules[site.module]._parameters[site.attribute] = self.parameters[site.parameter]

    def _unplug(self, sites: Iterable[Site]) -> None:
        for site in sites:
            if site.is_buffer:
                self._buffers.unplug(site)
            else:
                self._modules[site.module]._parameters[site.attribute] = self._vacant[site.name]

    def _may_lack(self, layer: int) -> bool:
        """Whether the files of weights may lack parameters of a layer: those of a language model have no classifier."""
        weights = self._structure.weights
        is_head = self._structure.task in CLASSIFICATION and layer == self._structure.num_layers - 1
        return is_head and not (weights is not None and weights.is_whole)

    @torch.no_grad()
    def _read_layer(self, layer: int, weights: WeightFiles | LiveWeights) -> None:
        model: Any = self._model  # only transformers' own models have files that it wrote
        in_files = weights.names_in_files(self._structure.layer_parameters(layer))
        wanted = set(in_files.values())
        if self._may_lack(layer):
            wanted = set(weights.known(wanted, model))
        else:
            # As in transformers, buffers that the files lack keep the values that the model's rules give them.
            buffers = wanted & self._structure.buffers.keys()
            wanted -= buffers - set(weights.known(buffers, model, renamed=True))
        shapes = {known: self._structure.shapes[name] for name, known in in_files.items()}
        values = weights.read(sorted(wanted), model, shapes)
        for name, known in in_files.items():
            if known in values:
                self.parameters[name].copy_(values[known])

    def _initialize_layer(self, layer: int, *, seed: int) -> None:
        # A tied parameter takes the value that it has at its home, so the rules of this layer must not reach it.
        borrowed = [site for site in self._structure.sites[layer] if site.name != site.parameter]
        self._unplug(borrowed)
        for root in self._structure.layer_roots(layer):
            initialize_module(self._model, self._modules[root], root, seed=seed)
        for name in sorted({site.parameter for site in borrowed}):
            home_layer, home = self._home_of(name)
            if home_layer == layer:
                continue  # the loop above has initialized it
            self._plug([home])
            initialize_module(self._model, self._modules[home.module], home.module, seed=seed)
            if home_layer not in self._layers:
                self._unplug([home])
        self._plug(borrowed)

    def _home_of(self, parameter: str) -> tuple[int, Site]:
        """Find the layer and the place that a tied parameter is named after."""
        return next(
            (layer, site)
            for layer in self._structure.layers_with(parameter)
            for site in self._structure.sites[layer]
            if site.name == parameter
        )


def fill_vacant(model: SplittableModel, *, device: torch.device) -> dict[str, nn.Parameter]:
    """Have parameters held elsewhere take no memory: the model's own code may ask for their type.

    They are not-a-number, so that no loss can depend on one unseen. Returns them, keyed by name.
    """
    filled: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        for attribute, vacant in module.named_parameters(recurse=False):
            value = unset((), dtype=vacant.dtype, device=device).expand(vacant.shape)
            made = module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
            vars(made).update(vars(vacant))
            filled[full_name(path, attribute)] = made
    return filled


def cast_in_blocks(model: SplittableModel, structure: ModelStructure) -> set[str]:
    """Return the names of parameters of blocks that are used by nothing but modules whose weights autocast casts."""
    used: dict[str, bool] = {}
    for layer, sites in enumerate(structure.sites):
        for site in sites:
            is_cast = type(model.get_submodule(site.module)) in (nn.Linear, Conv1D)
            is_cast = is_cast and structure.is_block(layer)
            used[site.parameter] = used.get(site.parameter, True) and is_cast
    # A script's hook takes a gradient as it comes without sharding.
    return {name for name, is_cast in used.items() if is_cast} - structure.hooks.keys()


def convert_vacant(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters without memory a type: stand-ins for a script's model would return zeros of its own type."""
    for vacant in model.parameters():
        if vacant.is_floating_point():
            vacant.data = vacant.data.to(dtype)


@dataclass(frozen=True, slots=True)
class _Plugged:
    name: str
    module: nn.Module
    attribute: str
    value: torch.Tensor
    """The tensor that the module reads: the state itself, or a copy in the buffer's own type."""
    state: torch.Tensor


class _StageBuffers:
    """The persistent buffers of a model's modules; those of layers held elsewhere have their initial values."""

    def __init__(self, model: SplittableModel, modules: Mapping[str, nn.Module], structure: ModelStructure) -> None:
        """`modules` are all of the model's, keyed by name, with the buffers' initial values.

        Raises ConfigError if the files of weights cannot supply buffers that every stage computes with.
        """
        self._model_class = type(model).__name__
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
                raise changed_buffer(each.name, model=self._model_class)

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
