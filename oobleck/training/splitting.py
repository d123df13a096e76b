"""How an unmodified transformers model comes apart into layers.

The blocks are the one list of `num_hidden_layers` gradient-checkpointing layers that the model has; what it
calls before the first of them belongs to the embedding layer, what it calls after the last to the head. Both
are found by running the model once on fake tensors with stand-ins for its blocks, so there is no code for any
particular model.

The same run proves that the cut is sound: autograd tells whether anything but the hidden states of the layer
before carries a gradient into a layer. A model for which it does (skip connections across blocks, embeddings
handed to every block, router losses) is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oobleck.errors import ConfigError

__all__ = ["Anatomy", "Passthrough", "ZeroEmbedding", "dissect", "replace_module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a model, by the names of its modules."""

    block_list: str
    """The module list that holds the blocks."""
    num_blocks: int
    prelude: tuple[str, ...]
    """Modules with parameters, or dropout, that run before the first block, in the order of their calls."""
    postlude: tuple[str, ...]
    """The same after the last block."""
    blocks_return_tuples: bool
    """Whether a block returns (hidden states, …) instead of the hidden states."""
    tied: Mapping[str, str]
    """Names of parameters that are another parameter, and that other one's name."""
    hidden_size: int


class Passthrough(nn.Module):
    """Stands in for a module that is elsewhere: gives back its first argument.

    A model may look at attributes of its blocks (which kind of attention, for instance), so those that this
    module lacks are looked up in the module that it stands in for.
    """

    def __init__(self, original: nn.Module, *, returns_tuple: bool = False) -> None:
        super().__init__()
        self.__dict__["original"] = original  # Not registered: its parameters are not this module's.
        self.__dict__["returns_tuple"] = returns_tuple

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden,) if self.__dict__["returns_tuple"] else hidden


class ZeroEmbedding(nn.Module):
    """Stands in for an embedding that is elsewhere: zeros, which take no memory and reach no block."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        self.embedding_dim = original.embedding_dim
        self.dtype = original.weight.dtype

    def forward(self, ids: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=self.dtype, device=ids.device)
        return zero.expand(*ids.shape, self.embedding_dim)


class _Probe(Passthrough):
    """Stands in for a block in the trial run: notes what comes in, and sends out a leaf of its own."""

    def __init__(self, original: nn.Module, *, returns_tuple: bool) -> None:
        super().__init__(original, returns_tuple=returns_tuple)
        self.received: torch.Tensor | None = None
        self.emitted: torch.Tensor | None = None
        self.side_input: str | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = [*((f"its argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
        (_, hidden), *others = named
        self.received = hidden
        self.emitted = torch.empty_like(hidden).requires_grad_()
        self.side_input = next((name for name, value in others if _carries_gradient(value)), None)
        return (self.emitted,) if self.returns_tuple else self.emitted


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one called `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def dissect(model: PreTrainedModel, *, sequence_length: int) -> Anatomy:
    """Find the layers of a model made of fake tensors, and prove that it can be cut between them.

    Run it in the mode that the model was built in.

    Raises:
        ConfigError: the model cannot be split; says why.
    """
    _refuse_losses_across_layers(model)
    block_list = _find_block_list(model)
    trial = _run_trial(model, block_list, sequence_length)
    tied = dict(model.all_tied_weights_keys or {})
    anatomy = Anatomy(
        block_list=block_list,
        num_blocks=trial.num_blocks,
        prelude=tuple(trial.prelude),
        postlude=tuple(trial.postlude),
        blocks_return_tuples=trial.blocks_return_tuples,
        tied=tied,
        hidden_size=trial.hidden_size,
    )
    _require_every_parameter_has_a_layer(model, anatomy)
    return anatomy


def _cannot(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(f"model.type: {model.config.model_type} cannot be split into layers: {why}")


def _refuse_losses_across_layers(model: PreTrainedModel) -> None:
    if getattr(model.config, "output_router_logits", False):
        raise _cannot(model, "its router loss reads all layers at once; set model.config.output_router_logits to false")


def _find_block_list(model: PreTrainedModel) -> str:
    count = getattr(model.config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise _cannot(model, "its configuration has no num_hidden_layers; perhaps its text model has a type of its own")
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    ]
    if len(found) != 1:
        raise _cannot(model, f"it needs exactly one list of {count} transformer blocks and has {len(found)} {found}")
    return found[0]


def _run_trial(model: PreTrainedModel, block_list: str, sequence_length: int) -> _Trial:
    """Try what nearly all blocks return, a tensor; a model that expects a tuple would take it apart."""
    first_error: ConfigError | None = None
    for returns_tuple in (False, True):
        trial = _Trial(model, block_list, returns_tuple=returns_tuple)
        try:
            trial.run(sequence_length)
        except ConfigError as error:
            first_error = first_error or error
        else:
            return trial
    assert first_error is not None
    raise first_error


class _Trial:
    """One run of the model with probes for blocks."""

    def __init__(self, model: PreTrainedModel, block_list: str, *, returns_tuple: bool) -> None:
        self.prelude: dict[str, nn.Module] = {}
        self.postlude: dict[str, nn.Module] = {}
        self.blocks_return_tuples = returns_tuple
        self._model = model
        self._block_list = block_list
        blocks = model.get_submodule(block_list)
        assert isinstance(blocks, nn.ModuleList)
        self._blocks = blocks
        self._probes = [_Probe(block, returns_tuple=returns_tuple) for block in blocks]

    @property
    def num_blocks(self) -> int:
        return len(self._probes)

    @property
    def hidden_size(self) -> int:
        received = self._probes[0].received
        assert received is not None
        return received.shape[-1]

    def run(self, sequence_length: int) -> None:
        """Run the model, and prove that nothing but the hidden states connects its layers."""
        loss = self._run_forward(sequence_length)
        self._require_a_chain()
        self._require_gradients_through_the_last_block_alone(loss)

    def _run_forward(self, sequence_length: int) -> torch.Tensor:
        originals = list(self._blocks)
        handles = [
            module.register_forward_pre_hook(self._note(name, module)) for name, module in self._modules_outside()
        ]
        ids = torch.zeros((1, sequence_length), dtype=torch.int64)
        try:
            for index, probe in enumerate(self._probes):
                self._blocks[index] = probe
            return self._model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]
        # A model's own code may fail in any way when its blocks are not there.
        except Exception as error:
            detail = " ".join(str(error).split())
            raise _cannot(self._model, f"it does not run without its blocks ({detail})") from error
        finally:
            for index, block in enumerate(originals):
                self._blocks[index] = block
            for handle in handles:
                handle.remove()

    def _modules_outside(self) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules beside the blocks that have parameters of their own or draw at random."""
        yield from self._outermost(self._model, "")

    def _outermost(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            holds_blocks = self._block_list.startswith(f"{name}.")
            has_parameters = any(True for _ in child.parameters(recurse=False))
            if name == self._block_list:
                continue
            if not holds_blocks and (has_parameters or isinstance(child, nn.Dropout)):
                yield name, child
            else:
                yield from self._outermost(child, f"{name}.")

    def _note(self, name: str, module: nn.Module) -> Any:
        def note(*_: Any) -> None:
            blocks_are_done = self._probes[-1].emitted is not None
            (self.postlude if blocks_are_done else self.prelude)[name] = module

        return note

    def _require_a_chain(self) -> None:
        expected: torch.Tensor | None = None
        for index, probe in enumerate(self._probes):
            if probe.received is None:
                raise _cannot(self._model, f"it does not call block {index}")
            if probe.side_input is not None:
                raise _cannot(
                    self._model,
                    f"block {index} takes {probe.side_input}, which carries gradients beside the hidden states",
                )
            if expected is not None and probe.received is not expected:
                raise _cannot(self._model, f"something changes the hidden states before block {index}")
            expected = probe.emitted

    def _require_gradients_through_the_last_block_alone(self, loss: torch.Tensor) -> None:
        tied = set((self._model.all_tied_weights_keys or {}).values())
        early = {
            f"{name}.{attribute}": parameter
            for name, module in self.prelude.items()
            for attribute, parameter in module.named_parameters()
            if f"{name}.{attribute}" not in tied and parameter.requires_grad
        }
        for index, probe in enumerate(self._probes[:-1]):
            assert probe.emitted is not None
            early[f"the output of block {index}"] = probe.emitted  # type: ignore[assignment]
        last = self._probes[-1].emitted
        assert last is not None
        through_last, *others = torch.autograd.grad(loss, [last, *early.values()], allow_unused=True)
        if through_last is None:
            raise _cannot(self._model, "its loss does not depend on its last block")
        for name, gradient in zip(early, others, strict=True):
            if gradient is not None:
                raise _cannot(self._model, f"its head reads {name} past the blocks")


def _carries_gradient(value: Any) -> bool:
    match value:
        case torch.Tensor():
            return value.requires_grad
        case tuple() | list():
            return any(_carries_gradient(item) for item in value)
        case dict():
            return any(_carries_gradient(item) for item in value.values())
        case _:
            return False


def _require_every_parameter_has_a_layer(model: PreTrainedModel, anatomy: Anatomy) -> None:
    homes = tuple(f"{name}." for name in (anatomy.block_list, *anatomy.prelude, *anatomy.postlude))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            raise _cannot(model, f"parameter {name} is not to be trained")
        if not name.startswith(homes):
            raise _cannot(model, f"parameter {name} is in no block and in no module that runs before or after them")
    both = set(anatomy.prelude) & set(anatomy.postlude)
    if both:
        raise _cannot(model, f"module {min(both)} runs both before and after its blocks")
