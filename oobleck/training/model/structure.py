"""A model as the planner sees it: named layers, each with its parameters, and no memory.

Parameters go by the names that they have in the whole model, so that whatever is kept or sent under these
names does not depend on a cut. A tied parameter has one canonical name and belongs to every layer that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import ModelSpec, Task

from .adapters import Adapters, adapters_of, add_adapters, new_adapters, unwrapped, with_fake_tensors
from .configuration import build_config, build_model, check_head, prepared, task_of, task_of_built
from .layered_model import LayeredModel, LossFunction, anatomy_of_layers
from .live_model import LiveModel, LiveWeights
from .losses import LossRule
from .signature import names_taken
from .splitting import Anatomy, dissect
from .weights import WeightFiles

__all__ = ["LossOfOutputs", "ModelStructure", "Site", "SplittableModel"]

SplittableModel = PreTrainedModel | LayeredModel
LossOfOutputs = Callable[..., torch.Tensor]
"""From a model's outputs, labels and `num_items_in_batch`, to the sum of the losses divided by that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the model's modules where a parameter is plugged in."""

    module: str
    attribute: str
    parameter: str
    """Canonical name."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """The layers of a model: the embedding, every block, and the head (the final norm included)."""

    config: PreTrainedConfig
    task: Task
    sequence_length: int
    anatomy: Anatomy
    sites: tuple[tuple[Site, ...], ...]
    """For each layer, where its parameters go."""
    shapes: Mapping[str, torch.Size]
    """Of every parameter, by canonical name, in the order of layers."""
    frozen: frozenset[str]
    """Parameters that are not trained, as `requires_grad` says of them."""
    takes: frozenset[str]
    """What its forward can be given beside tokens and labels."""
    draws_at_random: bool
    """Whether a forward pass in training draws random numbers (dropout, router jitter)."""

    make: Callable[[torch.dtype], SplittableModel]
    """Builds the model where torch's contexts say (a device, or fake tensors), in training mode."""
    weights: WeightFiles | LiveWeights | None
    """Where parameters start from; None: from the seed."""
    keeps_buffers: bool = False
    """Whether what is built has its buffers' values; else they follow from the model's rules."""
    compute_loss: LossOfOutputs | None = None
    """What takes the place of the model's own loss."""
    loss_rule: LossRule = field(default_factory=LossRule)
    """What the model's own loss is, as `with_tried_loss` finds out."""
    adapters: Adapters | None
    """Those in the model, which start from the seed; None: there are none."""

    @classmethod
    def from_spec(cls, model: ModelSpec, *, vocab_size: int, sequence_length: int) -> ModelStructure:
        """Build a transformers model of fake tensors and find its layers.

        Raises:
            ConfigError: unknown type or configuration key, a configuration that the model refuses, or a model
                that cannot be split.
        """
        config = build_config(model, vocab_size=vocab_size, sequence_length=sequence_length)
        task = task_of(model, config)
        adapters = None if model.lora.r is None else new_adapters(model.lora, task=task, base=model.path)

        def make(dtype: torch.dtype) -> SplittableModel:
            built = build_model(config, task=task, dtype=dtype)
            if adapters is not None:
                add_adapters(built, adapters)
            return built

        return cls._of(
            make,
            is_adapted=adapters is not None,
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
    ) -> ModelStructure:
        """Find the layers of what `factory` builds: a transformers model, or a list of layers with its loss.

        Without a loss, that of the next token is taken; without a task, that of the model's class. Raises ConfigError
        as above, for what the factory raises too.
        """

        def make(dtype: torch.dtype) -> SplittableModel:
            try:
                with _default_dtype(dtype):
                    built = unwrapped(factory())
            except ConfigError:
                raise
            # It is somebody else's code, and may fail in any way.
            except Exception as error:
                raise ConfigError(f"the script's model cannot be built: {type(error).__name__}: {error}") from error
            if isinstance(built, PreTrainedModel):
                return prepared(built)
            return LayeredModel(built, loss, vocab_size=vocab_size)  # type: ignore[arg-type]  # checked there

        is_adapted = adapters_of(_on_meta(make)) is not None
        return cls._of(
            make, is_adapted=is_adapted, config=None, task=task, sequence_length=sequence_length, weights=None
        )

    @classmethod
    def from_live(
        cls, live: LiveModel, *, compute_loss: LossOfOutputs | None = None, sequence_length: int
    ) -> ModelStructure:
        """Find the layers of a model that a script has made, from whose weights training starts.

        Raises ConfigError as above.
        """
        structure = cls._of(
            lambda dtype: prepared(live.make()),
            is_adapted=True,
            config=None,
            task=None,
            sequence_length=sequence_length,
            weights=live.weights,
        )
        return replace(structure, keeps_buffers=True, compute_loss=compute_loss)

    @classmethod
    def _of(
        cls,
        make: Callable[[torch.dtype], SplittableModel],
        *,
        is_adapted: bool,  # or made without torch's contexts
        config: PreTrainedConfig | None,
        task: Task | None,
        sequence_length: int,
        weights: WeightFiles | LiveWeights | None,
    ) -> ModelStructure:
        """Without a configuration, the model has its own; so it is with the task."""
        on_meta = _on_meta(make) if is_adapted else None
        with FakeTensorMode():
            skeleton = make(torch.float32) if on_meta is None else with_fake_tensors(on_meta)
            if isinstance(skeleton, LayeredModel):
                task, takes = task or "causal_lm", skeleton.takes
                anatomy = anatomy_of_layers(skeleton, sequence_length=sequence_length)
            else:
                task, takes = task or task_of_built(skeleton), names_taken(skeleton)
                check_head(skeleton.config, task)
                anatomy = dissect(skeleton, task=task, sequence_length=sequence_length)
        sites = tuple(tuple(_sites(skeleton, anatomy, roots)) for roots in _layer_roots(anatomy))
        parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        return cls(
            config=skeleton.config if config is None else config,
            task=task,
            sequence_length=sequence_length,
            anatomy=anatomy,
            sites=sites,
            shapes={site.parameter: parameters[site.name].shape for layer in sites for site in layer},
            frozen=_frozen(skeleton, sites),
            takes=takes,
            draws_at_random=isinstance(skeleton, LayeredModel) or _draws_at_random(skeleton),
            make=make,
            weights=weights,
            adapters=adapters_of(skeleton),
        )

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
        blocks = (f"{self.anatomy.block_list}.{index}" for index in range(self.num_blocks))
        return ("embedding", *blocks, "head")

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def layer_parameters(self, layer: int) -> tuple[str, ...]:
        """Return the canonical names of a layer's parameters; a tied one is in every layer that uses it."""
        return tuple(dict.fromkeys(site.parameter for site in self.sites[layer]))

    def trained_parameters(self, layer: int) -> tuple[str, ...]:
        """Return those of a layer's parameters that are trained."""
        return tuple(name for name in self.layer_parameters(layer) if name not in self.frozen)

    def layers_with(self, parameter: str) -> tuple[int, ...]:
        """Return the layers that use a parameter; more than one if it is tied across layers."""
        return self._layers_by_parameter[parameter]

    def layer_roots(self, layer: int) -> tuple[str, ...]:
        """Return the names of the modules that make up a layer."""
        return _layer_roots(self.anatomy)[layer]

    def layer_kind(self, layer: int) -> tuple[object, ...]:
        """Return what a layer's costs depend on: equal for layers that compute alike."""
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

    def is_block(self, layer: int) -> bool:
        return 0 < layer < self.num_layers - 1

    def _layer_type(self, layer: int) -> str | None:
        """Return what the configuration says of a block: full or sliding attention, dense or sparse, …"""
        said = [getattr(self.config, key, None) for key in ("layer_types", "mlp_layer_types")]
        return repr([kinds[layer - 1] for kinds in said if kinds]) if self.is_block(layer) else None

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


def _on_meta(make: Callable[[torch.dtype], SplittableModel], dtype: torch.dtype = torch.float32) -> SplittableModel:
    with torch.device("meta"):
        return make(dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block, floating-point tensors are of this type unless another is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _layer_roots(anatomy: Anatomy) -> tuple[tuple[str, ...], ...]:
    blocks = ((f"{anatomy.block_list}.{index}",) for index in range(anatomy.num_blocks))
    return (anatomy.prelude, *blocks, anatomy.postlude)


def _sites(skeleton: SplittableModel, anatomy: Anatomy, roots: tuple[str, ...]) -> Iterator[Site]:
    for root in roots:
        for path, module in skeleton.get_submodule(root).named_modules(prefix=root):
            for attribute, _ in module.named_parameters(recurse=False):
                name = f"{path}.{attribute}"
                yield Site(module=path, attribute=attribute, parameter=anatomy.tied.get(name, name))


def _frozen(skeleton: SplittableModel, sites: Iterable[Iterable[Site]]) -> frozenset[str]:
    """Find what is not trained. Raises ConfigError where nothing would be."""
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    names = {site.parameter for layer in sites for site in layer}
    frozen = frozenset(name for name in names if not parameters[name].requires_grad)
    if frozen == names:
        raise ConfigError("model: none of its parameters is to be trained; leave requires_grad of some as it is")
    return frozen


def _draws_at_random(skeleton: PreTrainedModel) -> bool:
    """Whether any dropout module or configured probability of dropping or jitter is not zero.

    Models apply some of these in functions, so the configuration is asked too. A wrong yes costs a few
    microseconds a layer; there must be no wrong no.
    """
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in skeleton.modules()):
        return True
    return _has_probability(skeleton.config.to_dict())


def _has_probability(config: Mapping[str, object]) -> bool:
    for key, value in config.items():
        if isinstance(value, dict):
            if _has_probability({str(inner): item for inner, item in value.items()}):
                return True
        elif _names_a_probability(key) and isinstance(value, int | float) and value > 0:
            return True
    return False


def _names_a_probability(key: str) -> bool:
    # Causal language models have no classifier and summary heads, though their configurations speak of them.
    return any(word in key for word in ("drop", "jitter", "noise")) and not key.startswith(("classifier", "summary"))
