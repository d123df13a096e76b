"""A model as the planner sees it: named layers, each with its parameters, and no memory.

Parameters have their names in the whole model, so that files and messages do not depend on a cut. A tied parameter has
one canonical name and belongs to every layer that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from oobleck.errors import ConfigError, UnbuiltModel, UncutModel
from oobleck.job import ModelSpec, Task
from oobleck.training.dropout import draws_at_random
from oobleck.training.flow import Flow, persistent_buffers
from oobleck.training.randomness import building_alike

from . import brought, configuration
from .adapters import Adapters, adapters_of, add_adapters, new_adapters, unwrapped, with_fake_tensors
from .layered_model import (
    LayeredModel,
    LossFunction,
    SplittableModel,
    anatomy_of_layers,
    arguments_of,
    config_of_script,
)
from .live_model import LiveModel, LiveWeights
from .losses import LossRule
from .own_values import own_value_of
from .splitting import Anatomy, dissect, require_one_stack, taken_with_its_loss
from .weights import WeightFiles

LossOfOutputs = Callable[..., torch.Tensor]
"""Maps a model's outputs, labels and `num_items_in_batch` to the sum of the losses divided by that number."""

_OURS = frozenset(
    {
        "self",
        "input_ids",
        "inputs_embeds",
        "labels",
        "past_key_values",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
    }
)
"""Arguments that no sample may bring: every batch has them, another model computes them, or they choose the output."""


class LossOfInputs(Protocol):
    """The loss of a whole model."""

    def __call__(self, model: nn.Module, inputs: dict[str, Any], num_items: int, /, *, step: int) -> torch.Tensor:
        """Return the loss of what a collator has made, as the script's own loop computes it in a step, from 1.

        `num_items` is the number of labels to divide by, for losses that do.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the model's modules where a parameter or a persistent buffer is plugged in."""

    module: str
    attribute: str
    parameter: str
    """Canonical name."""
    is_buffer: bool = False

    @property
    def name(self) -> str:
        return brought.full_name(self.module, self.attribute)


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """The layers of a model: the embedding, every block, and the head (the final norm included)."""

    config: PreTrainedConfig
    task: Task
    """Without a meaning for a model that is kept whole."""
    sequence_length: int
    anatomy: Anatomy
    sites: tuple[tuple[Site, ...], ...]
    """The places of each layer's parameters and persistent buffers."""
    shapes: Mapping[str, torch.Size]
    """Keyed by the canonical name of every parameter and persistent buffer, in the order of layers."""
    frozen: frozenset[str]
    """Buffers, and parameters without `requires_grad`."""
    buffers: Mapping[str, torch.dtype]
    """The persistent buffers' types in the model, keyed by canonical name."""
    takes: frozenset[str]
    """The arguments of its forward that a sample may bring, other than tokens and labels."""
    draws_at_random: bool
    """Whether a forward pass in training draws random numbers (dropout, router jitter)."""
    drops: bool = True
    """Turns dropout off if False; generators are still seeded as with dropout."""

    make: Callable[[torch.dtype], SplittableModel]
    """Builds the model in training mode; torch's contexts choose the device, or fake tensors."""
    weights: WeightFiles | LiveWeights | None
    """The initial parameters; None draws them from the seed."""
    keeps_buffers: bool = False
    """Whether `make` gives buffers their values; else the model's rules do."""
    compute_loss: LossOfOutputs | None = None
    """Replaces the model's own loss."""
    has_tried_loss: bool = False
    """Whether `with_tried_loss` has shown that `compute_loss` adds up; else its first microbatch tries it."""
    loss_rule: LossRule = field(default_factory=LossRule)
    """How the model's own loss is normalized, as found by `with_tried_loss`."""
    adapters: Adapters | None
    """They start from the seed."""
    hooks: Mapping[str, tuple[brought.GradientHook, ...]] = field(default_factory=dict)
    """The script's hooks on gradients of trained parameters, keyed by canonical name."""
    whole_loss: LossOfInputs | None = None
    """Computes the loss of a model that is kept whole; None for one that is cut into layers."""
    whole_class: str = ""
    """The class of a model of transformers that is kept whole."""

    @classmethod
    def from_spec(cls, model: ModelSpec, *, vocab_size: int, sequence_length: int) -> ModelStructure:
        """Build a transformers model of fake tensors and find its layers.

        Raises:
            ConfigError: unknown type or configuration key, a configuration that the model refuses, or a model
                that cannot be split.
        """
        # Nothing is padded, and a padding token's embedding never learns, so the model first has none. Some types do
        # not run without one, as they count positions from it.
        try:
            return cls._from_spec(model, vocab_size=vocab_size, sequence_length=sequence_length)
        except ConfigError as error:
            if (padded := configuration.with_padding(model)) is None:
                raise
            with suppress(ConfigError):
                return cls._from_spec(padded, vocab_size=vocab_size, sequence_length=sequence_length)
            raise error from None

    @classmethod
    def _from_spec(cls, model: ModelSpec, *, vocab_size: int, sequence_length: int) -> ModelStructure:
        config = configuration.build_config(model, vocab_size=vocab_size, sequence_length=sequence_length)
        task = configuration.task_of(model, config)
        adapters = None if model.lora.r is None else new_adapters(model.lora, task=task, base=model.path)

        def make(dtype: torch.dtype) -> SplittableModel:
            built = configuration.build_model(config, task=task, dtype=dtype)
            if adapters is not None:
                add_adapters(built, adapters)
            return built

        return cls._of(
            make,
            config=config,
            task=task,
            sequence_length=sequence_length,
            weights=None if model.path is None else WeightFiles(model.path),
        )

    @classmethod
    def from_factory(
        cls,
        factory: Callable[[], object],
        *,
        loss: LossFunction | None = None,
        task: Task | None = None,
        vocab_size: int,
        sequence_length: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        cache_dir: Path | None = None,
    ) -> ModelStructure:
        """Find the layers of what `factory` builds: a transformers model, or a list of layers with its loss.

        The loss defaults to that of the next token, the task to that of the model's class. A factory that sets
        parameters itself, or needs memory to run, also runs with `dtype` and `seed`: training starts from its values,
        which are written to `cache_dir`, unless that is None. Raises ConfigError as `from_spec`, and for any error of
        the factory.
        """

        def make(dtype: torch.dtype) -> SplittableModel:
            try:
                with default_dtype(dtype):
                    built = unwrapped(factory())
            except ConfigError:
                raise
            # The factory is the user's code, and may fail in any way.
            except Exception as error:
                raise UnbuiltModel(f"the script's model cannot be built: {type(error).__name__}: {error}") from error
            if isinstance(built, PreTrainedModel):
                return configuration.prepared(built)
            adapters_of(built)  # says what a PeftModel lacks
            return LayeredModel(built, loss, vocab_size=vocab_size)

        if _needs_values(make):
            with building_alike(seed):
                built = make(dtype)
            live = LiveModel.skeleton_of(built) if cache_dir is None else LiveModel.taken_apart(built, cache_dir)
            return cls.from_live(live, task=task, sequence_length=sequence_length)
        return cls._of(make, config=None, task=task, sequence_length=sequence_length, weights=None)

    @classmethod
    def from_live(
        cls,
        live: LiveModel,
        *,
        compute_loss: LossOfOutputs | None = None,
        task: Task | None = None,
        sequence_length: int,
    ) -> ModelStructure:
        """Find the layers of a model that a script has made. Training starts from its weights.

        Raises ConfigError as `from_spec`.
        """

        def make(dtype: torch.dtype) -> SplittableModel:
            built = live.make()
            assert isinstance(built, SplittableModel)
            return configuration.prepared(built) if isinstance(built, PreTrainedModel) else built

        structure = cls._of(
            make,
            config=None,
            task=task,
            sequence_length=sequence_length,
            weights=live.weights,
            has_loss=compute_loss is not None,
        )
        # A tied parameter has its hooks under each of its names; stages look them up under the canonical one.
        hooks = {name: live.hooks[name] for name in structure.shapes if name in live.hooks}
        return replace(structure, keeps_buffers=True, compute_loss=compute_loss, hooks=hooks)

    @classmethod
    def with_its_loss(
        cls, live: LiveModel, loss: LossOfInputs, *, sequence_length: int, flow: Flow | None = None
    ) -> ModelStructure:
        """Take a script's model that computes `loss`: as it has been traced, or else kept whole, as one layer.

        Raises ConfigError where nodes cannot train it.
        """

        def make(_dtype: torch.dtype) -> SplittableModel:
            built: Any = live.make()  # any module: what splitting needs of it is not used
            whole: SplittableModel = (
                configuration.prepared(built) if isinstance(built, PreTrainedModel) else built.train()
            )
            return whole

        on_meta = _on_meta(make)
        brought.require_no_hooks(on_meta)
        brought.require_independent_samples(on_meta)
        try:
            if (adapters := adapters_of(on_meta)) is None:
                brought.require_one_type(on_meta)
        except UncutModel:
            adapters = None  # as a whole, the model knows what to do with them
        config = getattr(on_meta, "config", None)
        structure = cls._placed(
            on_meta,
            taken_with_its_loss(on_meta, flow),
            config=config if isinstance(config, PreTrainedConfig) else config_of_script(0),
            task="causal_lm",
            sequence_length=sequence_length,
            takes=frozenset(),
            # Nothing declares what a whole model draws.
            draws_at_random=True,
            make=make,
            weights=live.weights,
            adapters=adapters,
        )
        hooks = {name: live.hooks[name] for name in structure.shapes if name in live.hooks}
        is_known = type(on_meta).__module__.startswith("transformers.")
        return replace(
            structure,
            keeps_buffers=True,
            hooks=hooks,
            whole_loss=loss,
            whole_class=type(on_meta).__name__ if is_known else "",
        )

    @classmethod
    def _of(
        cls,
        make: Callable[[torch.dtype], SplittableModel],
        *,
        config: PreTrainedConfig | None,
        task: Task | None,
        sequence_length: int,
        weights: WeightFiles | LiveWeights | None,
        has_loss: bool = False,
    ) -> ModelStructure:
        """Without a `config` or `task`, take the model's own. `has_loss` says that its own loss is not used."""
        on_meta = _on_meta(make)
        brought.require_no_hooks(on_meta)
        adapters = adapters_of(on_meta)
        with FakeTensorMode():
            skeleton = with_fake_tensors(on_meta)
            if isinstance(skeleton, LayeredModel):
                brought.require_independent_samples(skeleton)
                task, takes = task or "causal_lm", skeleton.takes
                anatomy = anatomy_of_layers(skeleton, sequence_length=sequence_length)
            else:
                require_one_stack(skeleton)
                task = task or configuration.task_of_built(skeleton)
                takes = arguments_of(type(skeleton).forward) - _OURS
                brought.require_independent_samples(skeleton)
                configuration.check_head(skeleton, task)
                if not has_loss:
                    configuration.require_known_loss(skeleton, task)
                anatomy = dissect(skeleton, task=task, sequence_length=sequence_length)
            ids = torch.zeros((1, sequence_length), dtype=torch.int64)
            brought.require_constant_buffers(skeleton, lambda: skeleton.base_model(input_ids=ids, use_cache=False))
        # Adapters may have another type than the model that they adapt.
        if adapters is None:
            brought.require_one_type(on_meta)
        return cls._placed(
            skeleton,
            anatomy,
            config=skeleton.config if config is None else config,
            task=task,
            sequence_length=sequence_length,
            takes=takes,
            # A script's own layers may draw in functions, which nothing declares.
            draws_at_random=isinstance(skeleton, LayeredModel) or draws_at_random(skeleton),
            make=make,
            weights=weights,
            adapters=adapters,
        )

    @classmethod
    def _placed(cls, skeleton: nn.Module, anatomy: Anatomy, **others: Any) -> ModelStructure:
        """Return a structure with the places, shapes and types of what the skeleton's layers hold."""
        sites = _all_sites(skeleton, anatomy)
        placed = [site for layer in sites for site in layer]
        state = dict(brought.named_state(skeleton))
        return cls(
            anatomy=anatomy,
            sites=sites,
            shapes={site.parameter: state[site.name].shape for site in placed},
            frozen=_frozen({site.parameter for site in placed}, state),
            buffers={site.parameter: state[site.parameter].dtype for site in placed if site.is_buffer},
            **others,
        )

    @cached_property
    def buffers_everywhere(self) -> frozenset[str]:
        """The names of the persistent buffers that belong to modules which run on every stage."""
        if self.is_whole:
            return frozenset()
        # Without the dot, `h.1` would match `h.10` too.
        roots = tuple(f"{root}." for root in self.layer_roots(0))
        return frozenset(site.name for site in self.sites[0] if site.is_buffer and not site.name.startswith(roots))

    @property
    def is_whole(self) -> bool:
        """Whether the model is one layer, on the only stage of each pipeline."""
        return self.anatomy.is_whole

    @property
    def flow(self) -> Flow | None:
        """What travels between the layers of a traced model."""
        return self.anatomy.flow

    @property
    def num_layers(self) -> int:
        return len(self.sites)

    @property
    def num_blocks(self) -> int:
        return self.anatomy.num_blocks

    @property
    def hidden_size(self) -> int:
        return self.anatomy.hidden_size

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        if self.is_whole:
            return ("model",)
        if self.flow is not None:
            return self.flow.layer_names
        blocks = (f"{self.anatomy.block_list}.{index}" for index in range(self.num_blocks))
        return ("embedding", *blocks, "head")

    @cached_property
    def num_parameters(self) -> int:
        """Tied parameters count once."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in self.buffers)

    def layer_parameters(self, layer: int) -> tuple[str, ...]:
        """Return the canonical names of a layer's parameters; a tied one is in every layer that uses it."""
        return tuple(dict.fromkeys(site.parameter for site in self.sites[layer]))

    def trained_parameters(self, layer: int) -> tuple[str, ...]:
        """Return the canonical names of a layer's parameters that are not frozen."""
        return tuple(name for name in self.layer_parameters(layer) if name not in self.frozen)

    def layers_with(self, parameter: str) -> tuple[int, ...]:
        """Return the layers that use a parameter; more than one if it is tied across layers."""
        return self._layers_by_parameter[parameter]

    def layer_roots(self, layer: int) -> tuple[str, ...]:
        """Return the names of the modules that make up a layer."""
        return self.anatomy.layer_roots[layer]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the modules that are alike, for which layers are compiled, and recomputed."""
        if self.flow is not None:
            return tuple(sorted(self.flow.blocks))
        return tuple(self.layer_roots(layer)[0] for layer in range(self.num_layers) if self.is_block(layer))

    def layer_kind(self, layer: int) -> tuple[object, ...]:
        """Return a value that is equal for layers which cost the same."""
        if self.flow is not None:
            return self._traced_kind(self.flow, layer)
        root = self.layer_roots(layer)[0]
        shapes = tuple(
            (
                site.name.removeprefix(root) if self.is_block(layer) else site.name,
                self.shapes[site.parameter],
                site.parameter in self.frozen,
            )
            for site in self.sites[layer]
        )
        return self.is_block(layer), self._layer_type(layer), shapes

    def _traced_kind(self, flow: Flow, layer: int) -> tuple[object, ...]:
        sites = tuple(
            (site.attribute, self.shapes[site.parameter], site.parameter in self.frozen) for site in self.sites[layer]
        )
        units = tuple((root.rpartition(".")[0], root in flow.blocks) for root in self.layer_roots(layer))
        # Blocks are alike; whatever else runs with them is not.
        return (units, sites) if all(is_block for _, is_block in units) else (layer,)

    def is_block(self, layer: int) -> bool:
        return 0 < layer < self.num_layers - 1

    def _layer_type(self, layer: int) -> str | None:
        """Return a block's type in the configuration: full or sliding attention, dense or sparse, …"""
        types = [getattr(self.config, key, None) for key in ("layer_types", "mlp_layer_types")]
        return repr([each[layer - 1] for each in types if each]) if self.is_block(layer) else None

    def build(self, *, dtype: torch.dtype) -> SplittableModel:
        """Return the model's modules on the meta device, in training mode."""
        return _on_meta(self.make, dtype)

    @cached_property
    def _layers_by_parameter(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for layer in range(self.num_layers):
            for name in self.layer_parameters(layer):
                found.setdefault(name, []).append(layer)
        return {name: tuple(layers) for name, layers in found.items()}


def _needs_values(make: Callable[[torch.dtype], SplittableModel]) -> bool:
    """Whether a script's model has values of its own, or cannot be built without memory."""
    try:
        return own_value_of(lambda: _on_meta(make)) is not None
    except ConfigError:
        return True  # building it with memory succeeds, or raises the error for the user


def _on_meta(make: Callable[[torch.dtype], SplittableModel], dtype: torch.dtype = torch.float32) -> SplittableModel:
    with torch.device("meta"):
        return make(dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block, floating-point tensors are of this type unless another is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _all_sites(skeleton: nn.Module, anatomy: Anatomy) -> tuple[tuple[Site, ...], ...]:
    layers = [list(_sites(skeleton, anatomy, roots)) for roots in anatomy.layer_roots]
    if anatomy.flow is not None:
        _add_read_outside(layers, skeleton, anatomy, anatomy.flow)
    embedding, *others = map(tuple, layers)
    placed = {site.name for layer in (embedding, *others) for site in layer}
    modules = ((path, module) for path, module in skeleton.named_modules(remove_duplicate=False))
    # Every stage runs the modules outside the layers; the state of their buffers needs one home, the embedding.
    everywhere = (site for path, module in modules for site in _buffer_sites(path, module, anatomy))
    return (*embedding, *(site for site in everywhere if site.name not in placed)), *others


def _add_read_outside(layers: list[list[Site]], skeleton: nn.Module, anatomy: Anatomy, flow: Flow) -> None:
    """Give each layer the parameters that the model's own code reads for it, and the first those of no layer."""
    every = {
        (name := brought.full_name(path, attribute)): Site(
            module=path, attribute=attribute, parameter=anatomy.tied.get(name, name)
        )
        for path, module in skeleton.named_modules()
        for attribute, _ in module.named_parameters(recurse=False)
    }
    of_modules = {site.name for layer in layers for site in layer}
    for number, layer in enumerate(layers):
        read = flow.parameters_of(number)
        # The code may read a tied parameter by any of its names, and the trace knows one of them.
        tied = {each.parameter for name, each in every.items() if name in read}
        read |= {name for name, each in every.items() if each.parameter in tied and name not in of_modules}
        layer += [every[name] for name in sorted(read - {site.name for site in layer})]
    placed = {site.parameter for layer in layers for site in layer}
    layers[0] += [site for site in every.values() if site.parameter not in placed]


def _sites(skeleton: nn.Module, anatomy: Anatomy, roots: tuple[str, ...]) -> Iterator[Site]:
    for root in roots:
        for path, module in skeleton.get_submodule(root).named_modules(prefix=root):
            for attribute, _ in module.named_parameters(recurse=False):
                name = brought.full_name(path, attribute)
                yield Site(module=path, attribute=attribute, parameter=anatomy.tied.get(name, name))
            yield from _buffer_sites(path, module, anatomy)


def _buffer_sites(path: str, module: nn.Module, anatomy: Anatomy) -> Iterator[Site]:
    for attribute, _ in persistent_buffers(module):
        name = brought.full_name(path, attribute)
        yield Site(module=path, attribute=attribute, parameter=anatomy.tied.get(name, name), is_buffer=True)


def _frozen(names: set[str], state: Mapping[str, torch.Tensor]) -> frozenset[str]:
    frozen = frozenset(name for name in names if not state[name].requires_grad)
    if frozen == names:
        raise ConfigError("model: none of its parameters is to be trained; leave requires_grad of some as it is")
    return frozen
