"""How an unmodified transformers model comes apart into layers.

The blocks are the model's one list of `num_hidden_layers` gradient-checkpointing layers. Modules called before the
first block belong to the embedding layer, modules called after the last to the head. A run on fake tensors, with
placeholders for the blocks, finds both, so there is no code for any particular model.

The same run proves that only the hidden states of the layer before carry a gradient into a layer. Other models (skip
connections across blocks, embeddings passed to every block, router losses) are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oobleck.errors import ConfigError
from oobleck.job import Task
from oobleck.training.flow import Flow

from .adapters import tied_parameters
from .brought import shared_tensors
from .configuration import TWO_STACKS
from .split_probe import SplitProbe, cannot_split


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
