"""A run of a model with probes for its blocks: finds what runs before and after them, and what connects them.

Made to run on fake tensors. Autograd and the identity of tensors tell what flows where.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedConfig, PreTrainedModel

from oobleck.errors import UncutModel
from oobleck.job import Task
from oobleck.training.memory import is_of_a_script

from .adapters import is_adapted, tied_parameters
from .placeholders import Passthrough, replace_module, stand_in_before_blocks


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
