"""How an unmodified transformers model comes apart into layers.

The blocks are the model's one list of `num_hidden_layers` gradient-checkpointing layers. Modules called before the
first block belong to the embedding layer, modules called after the last to the head. A run on fake tensors, with
placeholders for the blocks, finds both, so there is no code for any particular model. Autograd and the identity of
tensors tell what flows where.

The same run proves that only the hidden states of the layer before carry a gradient into a layer. Other models (skip
connections across blocks, embeddings passed to every block, router losses) are refused with the reason.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oobleck.errors import ConfigError, UncutModel
from oobleck.job import Task
from oobleck.training.flow import Flow
from oobleck.training.memory import is_of_a_script

from .adapters import is_adapted, tied_parameters
from .brought import shared_tensors
from .configuration import TWO_STACKS
from .placeholders import Passthrough, replace_module, stand_in_before_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The names of the modules that make up each part of a model."""

    block_list: str
    num_blocks: int
    prelude: tuple[str, ...]
    """The modules with parameters or dropout that run before the first block, in the order of their calls.

    Other modules that run there make masks and tables, which every stage needs.
    """
    postlude: tuple[str, ...]
    """All modules that run after the last block."""
    blocks_return_tuples: bool
    """Whether a block returns (hidden states, …) instead of the hidden states."""
    tied: Mapping[str, str]
    """The canonical name of each parameter that is the same object as another."""
    hidden_size: int
    widths: Mapping[str, int] = field(default_factory=dict)
    """The number of output features of modules of the prelude that change it."""
    is_whole: bool = False
    """Whether the model is one layer, the module of the empty name."""
    flow: Flow | None = None
    """What a traced model's layers call, and what travels between them."""

    @property
    def layer_roots(self) -> tuple[tuple[str, ...], ...]:
        if self.is_whole:
            return (("",),)
        if self.flow is not None:
            return tuple(map(self.flow.roots_of, range(self.flow.num_layers)))
        blocks = ((f"{self.block_list}.{index}",) for index in range(self.num_blocks))
        return (self.prelude, *blocks, self.postlude)


def dissect(model: PreTrainedModel, *, task: Task, sequence_length: int) -> Anatomy:
    """Find the layers of a model made of fake tensors, and prove that it can be cut between them.

    The FakeTensorMode that `model` was built in must be active. Raises ConfigError where the model cannot be split.
    """
    if getattr(model.config, "output_router_logits", False):
        raise cannot_split(
            model, "its router loss reads all layers at once; set model.config.output_router_logits to false"
        )
    block_list = _find_block_list(model)
    probe = _run_probe(model, block_list, task, sequence_length)
    anatomy = Anatomy(
        block_list=block_list,
        num_blocks=probe.num_blocks,
        prelude=tuple(probe.prelude),
        postlude=tuple(probe.postlude),
        blocks_return_tuples=probe.blocks_return_tuples,
        tied=tied_parameters(model),
        hidden_size=probe.hidden_size,
        widths={name: width for name, width in probe.widths.items() if name in probe.prelude},
    )
    _require_every_parameter_has_a_layer(model, anatomy)
    return anatomy


def taken_with_its_loss(model: nn.Module, flow: Flow | None) -> Anatomy:
    """Return the anatomy of a model that is cut as it has been traced, or, without a trace, kept whole."""
    declared = model.all_tied_weights_keys if isinstance(model, PreTrainedModel) else None
    return Anatomy(
        block_list="",
        num_blocks=0 if flow is None else flow.num_layers,
        prelude=(),
        postlude=(),
        blocks_return_tuples=False,
        tied=shared_tensors(model, dict(declared or {})),
        hidden_size=0,
        is_whole=flow is None,
        flow=flow,
    )


def require_one_stack(model: PreTrainedModel) -> None:
    """Raise ConfigError for an encoder-decoder."""
    if model.config.is_encoder_decoder:
        raise cannot_split(model, f"it is an encoder-decoder: {TWO_STACKS}")


def _find_block_list(model: PreTrainedModel) -> str:
    count = getattr(model.config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise cannot_split(
            model, "its configuration has no num_hidden_layers; perhaps its text model has a type of its own"
        )
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        # transformers derives its blocks from this class, for its own activation checkpointing.
        and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    ]
    if len(found) != 1:
        lists = ", ".join(found) or ", ".join(_lists_of_modules(model)) or "no list of modules"
        raise cannot_split(
            model,
            f"it needs exactly one list of {count} transformer blocks (as num_hidden_layers says, each a "
            f"GradientCheckpointingLayer), and has {lists}",
        )
    _require_blocks_of_their_own(model, found[0])
    return found[0]


def _lists_of_modules(model: PreTrainedModel) -> list[str]:
    """Describe the longest lists, one of which the user may have meant."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    longest = sorted(lists, key=lambda each: -len(each[1]))[:3]
    return [f"{name} ({len(module)} {type(module[0]).__name__})" for name, module in longest if len(module)]


def _require_blocks_of_their_own(model: PreTrainedModel, block_list: str) -> None:
    first: dict[int, int] = {}
    blocks = model.get_submodule(block_list)
    assert isinstance(blocks, nn.ModuleList)
    for index, block in enumerate(blocks):
        if first.setdefault(id(block), index) != index:
            raise cannot_split(model, f"block {index} is the same module as block {first[id(block)]}")


def _run_probe(model: PreTrainedModel, block_list: str, task: Task, sequence_length: int) -> SplitProbe:
    # Nearly all blocks return tensors, so these are tried first.
    errors: list[tuple[bool, ConfigError]] = []
    for returns_tuple in (False, True):
        probe = SplitProbe(model, block_list, returns_tuple=returns_tuple)
        try:
            probe.run(task, sequence_length)
        except ConfigError as error:
            errors.append((not probe.has_run, error))
        else:
            return probe
    # A probe that ran the model to its end knows the real reason; the other may fail on the wrong kind of output.
    _, clearest = min(errors, key=itemgetter(0))
    raise clearest


def _require_every_parameter_has_a_layer(model: PreTrainedModel, anatomy: Anatomy) -> None:
    # A parameter outside all layers would be held, trained and saved by no worker.
    homes = tuple(f"{name}." for name in (anatomy.block_list, *anatomy.prelude, *anatomy.postlude))
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not name.startswith(homes):
            raise cannot_split(
                model, f"parameter {name} is in no block and in no module that runs before or after them"
            )
    if both := set(anatomy.prelude) & set(anatomy.postlude):
        raise cannot_split(model, f"module {min(both)} runs both before and after its blocks")


# --- the run ------------------------------------------------------------------------------------------------


def cannot_split(model: nn.Module, why: str) -> UncutModel:
    """Return the error that says why a model has no layers that could be placed apart."""
    kind, config = type(model).__name__, model.config
    assert isinstance(config, PreTrainedConfig)
    message = f"model: {kind} (model.type: {config.model_type}) cannot be split into layers: {why}"
    return UncutModel(message, reason=why)


class _Probe(Passthrough):
    """Stands in for a block in the probe's run: notes what comes in, and sends out a leaf of its own."""

    def __init__(self, original: nn.Module, *, returns_tuple: bool) -> None:
        super().__init__(original, returns_tuple=returns_tuple)
        self.received: torch.Tensor | None = None
        self.emitted: torch.Tensor | None = None
        self.side_input: str | None = None
        self.entering: torch.Tensor | None = None
        """What it sends out whatever comes in, as the first block of a stage does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = [*((f"its argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
        (_, hidden), *others = named
        self.received = hidden
        # A leaf of its own: a gradient that flows from one layer into another past the probe shows.
        self.emitted = (torch.empty_like(hidden) if self.entering is None else self.entering).requires_grad_()
        self.side_input = next((name for name, value in others if _carries_gradient(value)), None)
        return (self.emitted,) if self.returns_tuple else self.emitted


class SplitProbe:
    def __init__(self, model: PreTrainedModel, block_list: str, *, returns_tuple: bool) -> None:
        self.prelude: dict[str, nn.Module] = {}
        self.postlude: dict[str, nn.Module] = {}
        self.widths: dict[str, int] = {}
        """How many features modules give, where these are not as many as they take."""
        self._weightless_prelude: set[str] = set()
        self._untraceable: list[str] = []
        """Modules before the blocks that hide from autograd what comes of their parameters."""
        self.blocks_return_tuples = returns_tuple
        self.has_run = False
        """Whether the model has run with probes for its blocks, whatever was found then."""
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

    def run(self, task: Task, sequence_length: int) -> None:
        """Run the model, and prove that nothing but the hidden states connects its layers."""
        ids = torch.zeros((1, sequence_length), dtype=torch.int64)
        labels = ids[:, 0] if task == "sequence_classification" else ids
        with self._training_everything():
            self._require_sound_cuts(ids, labels)

    def _require_sound_cuts(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        with self._noting_calls(), self._probing():
            loss = self._model(input_ids=ids, labels=labels, use_cache=False).loss
        self.has_run = True
        if not isinstance(loss, torch.Tensor):
            raise cannot_split(self._model, f"{type(self._model).__name__} returns no loss for labels")
        self._require_a_chain()
        self._require_gradients_through_the_last_block_alone(loss)
        # A stage without the head passes on what its last block returns, and nothing else may touch it on the way.
        with self._without_postlude(), self._probing():
            output = self._model.base_model(input_ids=ids, use_cache=False)
        self._require_nothing_after_the_blocks(output)
        # The same holds for a stage without the embedding, whose stand-ins must also suit the model's own code.
        with self._without_prelude(), self._without_postlude(), self._probing():
            output = self._model.base_model(input_ids=ids, use_cache=False)
        self._require_nothing_after_the_blocks(output)

    @contextmanager
    def _training_everything(self) -> Iterator[None]:
        # Gradients show what depends on what, so frozen parameters need them too.
        frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_()
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    @contextmanager
    def _probing(self) -> Iterator[None]:
        originals = list(self._blocks)
        try:
            for index, probe in enumerate(self._probes):
                self._blocks[index] = probe
            yield
        # A model's own code may fail in any way when its blocks are not there.
        except Exception as error:
            raise cannot_split(self._model, f"it does not run without its blocks {_reason_of(error)}") from error
        finally:
            for index, block in enumerate(originals):
                self._blocks[index] = block

    @contextmanager
    def _noting_calls(self) -> Iterator[None]:
        handles = [
            handle
            for name, module in self._modules_outside()
            for handle in (
                module.register_forward_pre_hook(self._note(name, module)),
                module.register_forward_hook(self._note_output(name, module)),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _without_prelude(self) -> Iterator[None]:
        """Within the block, the model is what a stage without the embedding is, whose first block is the model's."""
        received = self._probes[0].received
        assert received is not None
        self._probes[0].entering = torch.empty_like(received)
        for name, module in self.prelude.items():
            stand_in = stand_in_before_blocks(module, width=self.widths.get(name), device=received.device)
            replace_module(self._model, name, stand_in)
        try:
            yield
        finally:
            self._probes[0].entering = None
            for name, module in self.prelude.items():
                replace_module(self._model, name, module)

    @contextmanager
    def _without_postlude(self) -> Iterator[None]:
        """Within the block, the model is what a stage without the head is."""
        for name, module in self.postlude.items():
            replace_module(self._model, name, Passthrough(module))
        try:
            yield
        finally:
            for name, module in self.postlude.items():
                replace_module(self._model, name, module)

    def _modules_outside(self) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules beside the blocks that have parameters of their own, or no modules in them but an
        adapter's."""
        yield from self._outermost(self._model, "")

    def _outermost(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            holds_blocks = self._block_list.startswith(f"{name}.")
            is_leaf = not any(True for _ in child.children())
            if name == self._block_list:
                continue
            if not holds_blocks and (is_leaf or _has_own_parameters(child) or is_adapted(child)):
                yield name, child
            else:
                yield from self._outermost(child, f"{name}.")

    def _note(self, name: str, module: nn.Module) -> Any:
        is_weightless = not (_has_own_parameters(module) or is_adapted(module) or isinstance(module, nn.Dropout))

        def note(*_: Any) -> None:
            blocks_are_done = self._probes[-1].emitted is not None
            # A module without weights that runs before the blocks as well makes what every stage needs; it is not the
            # head's.
            if blocks_are_done and name not in self._weightless_prelude:
                self.postlude[name] = module
            elif is_weightless:
                self._weightless_prelude.add(name)
            else:
                self.prelude[name] = module

        return note

    def _note_output(self, name: str, module: nn.Module) -> Any:
        def note(_module: nn.Module, inputs: Any, output: Any) -> None:
            if inputs and _width_of(inputs[0]) not in (None, width := _width_of(output)) and width is not None:
                self.widths[name] = width
            blocks_have_begun = self._probes[0].received is not None
            if _has_own_parameters(module) and not blocks_have_begun and not _carries_gradient(output):
                self._untraceable.append(name)

        return note

    def _require_a_chain(self) -> None:
        if self._untraceable:
            raise cannot_split(
                self._model, f"{self._untraceable[0]} computes without gradients, so nothing shows which layers need it"
            )
        expected: torch.Tensor | None = None
        for index, probe in enumerate(self._probes):
            if probe.received is None:
                raise cannot_split(self._model, f"it does not call block {index}")
            if probe.side_input is not None:
                raise cannot_split(
                    self._model,
                    f"block {index} takes {probe.side_input}, which carries gradients beside the hidden states",
                )
            # The same object: what the model computes between two blocks would run on every stage.
            if expected is not None and probe.received is not expected:
                raise cannot_split(self._model, f"something changes the hidden states before block {index}")
            expected = probe.emitted

    def _require_gradients_through_the_last_block_alone(self, loss: torch.Tensor) -> None:
        # A tied parameter may be used by the embedding and by the head: it belongs to both layers.
        tied = set(tied_parameters(self._model).values())
        early = {
            f"{name}.{attribute}": parameter
            for name, module in self.prelude.items()
            for attribute, parameter in module.named_parameters()
            if f"{name}.{attribute}" not in tied
        }
        for index, probe in enumerate(self._probes[:-1]):
            assert probe.emitted is not None
            early[f"the output of block {index}"] = probe.emitted  # type: ignore[assignment]
        last = self._probes[-1].emitted
        assert last is not None
        through_last, *others = torch.autograd.grad(loss, [last, *early.values()], allow_unused=True)
        if through_last is None:
            raise cannot_split(self._model, "its loss does not depend on its last block")
        for name, gradient in zip(early, others, strict=True):
            if gradient is not None:
                raise cannot_split(self._model, f"its head uses {name} directly, bypassing the blocks")

    def _require_nothing_after_the_blocks(self, output: Any) -> None:
        """Without its head, the model must give out what its last block gave, or a view of all of it."""
        hidden = getattr(output, "last_hidden_state", None)
        emitted = self._probes[-1].emitted
        assert emitted is not None
        if not isinstance(hidden, torch.Tensor):
            raise cannot_split(self._model, "its base model returns no last_hidden_state")
        is_the_same = hidden is emitted or (hidden._base is emitted and hidden.shape == emitted.shape)
        if not is_the_same:
            raise cannot_split(
                self._model, "something that is no module changes the hidden states after the last block"
            )


def _has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _width_of(value: Any) -> int | None:
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.ndim else None


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


def _reason_of(error: Exception) -> str:
    """Say why a model does not run, and where in the script's own code, if it is that."""
    detail, place = " ".join(str(error).split()), None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_of_a_script(str(frame.f_globals.get("__name__"))):
            code = frame.f_code
            place = f"{code.co_qualname}, line {line} of {Path(code.co_filename).name}"
    if place is None:
        return f"({detail})"
    if "FakeTensor" in detail:
        detail = (
            "it computes with a tensor, or a model, that is none of its own: nodes have copies of its parameters and "
            "buffers alone, so make it one of them, by register_buffer say, or give compute_loss_func"
        )
    elif isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        detail = f"what it does depends on values of tensors, by {detail}, and layers are found without values"
    elif "NoneType" in detail:
        detail = f"{detail}; it is given input_ids and labels alone"
    return f"({detail}), in {place}"
