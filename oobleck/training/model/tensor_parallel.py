"""Tensor parallelism inside a stage: the devices of a node share every layer, by the model's own plan.

A transformers model's plan cuts its linear layers by columns or by rows. Between a layer cut by columns and the next
one cut by rows, each device computes its share of the features. Before, all devices have the same values; after, their
shares are summed (Shoeybi et al., "Megatron-LM", 2019, section 3). Embedding and head are cut by words: a device looks
up those that it has, and computes their logits, of which the standard loss needs no others (`losses.ChunkedLoss`).
Modules that the plan cuts in other ways stay whole on every device. Between shared modules, hidden states are cut by
tokens where a model's code allows it (`token_shares.py`).

Sums are interruptible, unlike those of DTensor, whose group no worker can leave: when a pipeline breaks, the devices of
a stage may notice it at different moments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oobleck.errors import ConfigError
from oobleck.job import JobSpec, Sharding

from . import losses
from .contexts import ContextShare, require_shared_contexts, share_contexts
from .experts import Collectives, experts_of, place_experts
from .forward_passes import uncompiled
from .models import StageModel
from .structure import ModelStructure
from .token_shares import TokenShare, can_cut_tokens, hidden_in, with_hidden

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the devices of the stage, in place, and returns it."""


class Style(StrEnum):
    """The way in which devices share a module, by its name in transformers."""

    COLUMNS = "colwise"
    ROWS = "rowwise"
    SUMMED = "replicated_with_grad_allreduce"
    """Whole on every device, which uses it only for its own features, so that its gradients are summed."""
    EMBEDDING = "embedding_rowwise"
    HEAD = "colwise_gather_output"


_WHOLE = (Style.HEAD, "colwise_rep", "rowwise_split_input", "rowwise_rep", Style.EMBEDDING)
"""Styles of modules that others see as whole, so that these plans can be ignored; embedding and head have their own."""
_CUT_BY_WORDS = (Style.EMBEDDING, Style.HEAD)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of the model that one of the devices of a stage holds."""

    rank: int
    degree: int
    whole: ModelStructure
    structure: ModelStructure
    """With the shapes of the shares."""
    sharding: Sharding = "none"
    """What devices share out that compute with whole parameters (`sharded`); `none` for tensor parallelism."""
    styles: Mapping[str, Style]
    """Keyed by module."""
    cut_dimensions: Mapping[str, int]
    """The dimension along which a parameter is cut, keyed by parameter."""
    summed: frozenset[str]
    """Whole parameters with partial gradients."""
    cuts_tokens: bool = False
    """Whether each device has its share of the tokens' hidden states before and after each block."""
    experts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The parameters of each module whose experts stay on the devices that hold them, keyed by module."""
    context_parallel: int = 1
    """The devices that share each sample's tokens."""

    @property
    def is_sharded(self) -> bool:
        return self.sharding != "none"

    @property
    def cached(self) -> frozenset[str]:
        """The parameters whose whole values follow from shares."""
        return frozenset(self.cut_dimensions if self.is_sharded else ()) - self._placed

    @property
    def computed(self) -> ModelStructure:
        """The model with the shapes of the parameters that modules compute with."""
        shapes = self.structure.shapes
        if not self.is_sharded:
            return self.structure
        return replace(
            self.whole,
            shapes={**self.whole.shapes, **{name: shapes[name] for name in self._placed}},
            sequence_length=self.whole.sequence_length // self.context_parallel,
        )

    @property
    def lane(self) -> tuple[int, int]:
        """The number of the microbatch that this device computes among those of its stage, and how many these are."""
        each = self.context_parallel if self.is_sharded else self.degree
        return self.rank // each, self.degree // each

    @property
    def part(self) -> tuple[int, int]:
        """The number of this device's part of each sample, and how many there are."""
        return self.rank % self.context_parallel, self.context_parallel

    @property
    def _placed(self) -> frozenset[str]:
        """The parameters of experts that stay where they are."""
        return frozenset().union(*self.experts.values())

    @property
    def sums_in_passes(self) -> bool:
        """Whether devices sum the gradients of each microbatch in its backward pass."""
        return self.sharding in ("gradients", "all")

    def is_whole(self, parameter: str) -> bool:
        """Return whether all devices of a stage have the same gradient of this parameter."""
        return parameter not in self.cut_dimensions and parameter not in self.summed

    def part_of(self, parameter: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this device's share of a whole parameter."""
        if (dimension := self.cut_dimensions.get(parameter)) is None:
            return whole
        rows = rows_of(whole.shape[dimension], rank=self.rank, degree=self.degree)
        return whole.narrow(dimension, rows.start, len(rows))


def rows_of(count: int, *, rank: int, degree: int) -> range:
    """Return the rows of a device: as many for all, but the last ones may have fewer, or none."""
    each = -(-count // degree)
    return range(min(rank * each, count), min((rank + 1) * each, count))


def share_of(structure: ModelStructure, *, rank: int, degree: int) -> Share:
    """Cut a model by its own plan. Raises ConfigError if it has none, or cannot be divided by `degree`."""
    if structure.whole_loss is not None and degree > 1:
        raise ConfigError(
            f"tensor_parallel: {degree} devices cannot share a model that computes its loss; leave it out"
        )
    styles, cuts_tokens = _styles(structure, degree) if degree > 1 else ({}, False)
    cut: dict[str, int] = {}
    summed: set[str] = set()
    sites = [(layer, site) for layer, sites in enumerate(structure.sites) for site in sites]
    for layer, site in sites:
        style = styles.get(site.module)
        # What a block has beside shared layers takes this device's tokens: norms, and the biases of `_row_forward`.
        takes_tokens = cuts_tokens and structure.is_block(layer) and style is not Style.COLUMNS
        if style is Style.SUMMED or (takes_tokens and (style is None or site.attribute == "bias")):
            summed.add(site.parameter)
        # The bias of a layer cut by rows stays whole: it is added once, after the sum.
        elif style is Style.COLUMNS or style in _CUT_BY_WORDS:
            cut[site.parameter] = 0
        elif style is Style.ROWS and site.attribute == "weight":
            cut[site.parameter] = 1
    shapes = {name: _cut_shape(structure, name, cut.get(name), degree) for name in structure.shapes}
    _require_whole_heads(structure, degree)
    return Share(
        rank=rank,
        degree=degree,
        whole=structure,
        structure=replace(structure, shapes=shapes),
        styles=styles,
        cut_dimensions=cut,
        summed=frozenset(summed - structure.buffers.keys()),
        cuts_tokens=cuts_tokens,
    )


def sharded(
    structure: ModelStructure,
    *,
    rank: int,
    degree: int,
    sharding: Sharding,
    expert_parallel: bool = False,
    context_parallel: int = 1,
    attention: str | None = None,
) -> Share:
    """Cut the state of parameters by their first dimension, for a stage that is sharded.

    Buffers stay whole, and so do single numbers: if they are trained, each device has a gradient of its own
    microbatches. Frozen parameters, which have no optimizer state, are cut where all weights are, and those of experts
    with `expert_parallel`. `context_parallel` devices share each sample, and `attention` is as in `StageModel`. Raises
    ConfigError for a model that is kept whole, for a traced one of whose layers' passes nothing is known, and as
    `experts_of` and `require_shared_contexts`.
    """
    if structure.is_whole:
        raise ConfigError("sharding: devices cannot share out a model that is kept whole; leave it out")
    if structure.flow is not None and sharding != "optimizer":
        raise ConfigError(
            f"sharding: {sharding} needs a model whose layers run one after the other, and this one computes its loss "
            "itself; choose optimizer"
        )
    experts = experts_of(structure, degree=degree) if expert_parallel else {}
    if context_parallel > 1:
        require_shared_contexts(structure, degree=context_parallel, attention=attention)
    fixed = structure.buffers.keys() if sharding == "all" else structure.frozen.difference(*experts.values())
    cut = {
        name: torch.Size([len(rows_of(shape[0], rank=rank, degree=degree)), *shape[1:]])
        for name, shape in structure.shapes.items()
        if shape and name not in fixed
    }
    return Share(
        rank=rank,
        degree=degree,
        whole=structure,
        structure=replace(structure, shapes={**structure.shapes, **cut}),
        sharding=sharding,
        styles={},
        cut_dimensions=dict.fromkeys(cut, 0),
        summed=frozenset(structure.shapes.keys() - cut.keys() - structure.frozen),
        experts=experts,
        context_parallel=context_parallel,
    )


def share_for(job: JobSpec, structure: ModelStructure, *, rank: int) -> Share:
    """Cut a model as a job asks for, for one of the devices of a stage. Raises ConfigError as the cuts do.

    Where the planner has not chosen yet what devices share out, they share out the least.
    """
    if job.sharding == "none":
        return share_of(structure, rank=rank, degree=job.tensor_parallel)
    return sharded(
        structure,
        rank=rank,
        degree=job.sharding_devices,
        sharding=job.shardings[0],
        expert_parallel=job.expert_parallel,
        context_parallel=job.context_parallel,
        attention=job.attn_implementation,
    )


def install(stage: StageModel, share: Share, sum_up: Collectives) -> None:
    """Have the modules of a stage, which was built from the share's structure, compute this device's share."""
    tokens, eager = None, uncompiled if stage.compiles else _as_it_is
    if share.context_parallel > 1:
        share_contexts(stage, ContextShare(share.rank, share.degree, share.context_parallel, sum_up))
    if share.cuts_tokens:
        tokens = TokenShare(share.rank, share.degree, share.structure.sequence_length, sum_up)
        stage.share_tokens(tokens)
    for layer in range(share.structure.num_layers):
        for root, module in zip(share.structure.layer_roots(layer), stage.modules_of(layer), strict=True):
            named = dict(module.named_modules(prefix=root))
            entrances: dict[str, _Entrance] = {}
            for name, inner in named.items():
                if name in share.experts:
                    place_experts(inner, rank=share.rank, degree=share.degree, collectives=sum_up)
                    inner.forward = eager(inner.forward)
                match share.styles.get(name):
                    case Style.COLUMNS:
                        parent = name.rpartition(".")[0]
                        if parent not in entrances:
                            entrances[parent] = _Entrance(sum_up, tokens)
                            entrances[parent].watch(named[parent], eager)
                        inner.register_forward_pre_hook(eager(entrances[parent].enter))
                        inner.forward = eager(inner.forward)
                    case Style.ROWS:
                        inner.forward = eager(partial(_row_forward, inner, sum_up, tokens))
                    case Style.EMBEDDING:
                        inner.forward = partial(_embedding_forward, inner, share, sum_up)
                    case Style.HEAD:
                        inner.forward = partial(_head_forward, inner, share, sum_up)
                        stage.share_vocabulary(losses.VocabularyShare(share.rank, share.degree, sum_up))


def initialize_share(
    stage: StageModel, share: Share, parameters: Mapping[str, nn.Parameter], layers: Iterable[int], *, seed: int
) -> None:
    """Set the stage's `parameters` of held layers to their share of the whole model's initial values."""
    # Values are drawn whole, as on one device; one layer at a time needs the memory of one whole layer.
    source = StageModel(share.whole, dtype=stage.dtype, device=stage.device)
    for layer in layers:
        source.adopt(layer, layer + 1, {})
        source.initialize([layer], seed=seed)
        with torch.no_grad():
            for name, parameter in source.parameters.items():
                parameters[name].copy_(share.part_of(name, parameter))


def _as_it_is(function: Any) -> Any:
    return function


class _Enter(torch.autograd.Function):
    """Passes on values that every device has, and sums their partial gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, sum_up: AllReduce) -> torch.Tensor:
        ctx.sum_up = sum_up
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The sum works in place, and this gradient may be autograd's own.
        return ctx.sum_up(gradients[0].clone()), None


class _Leave(torch.autograd.Function):
    """Sums partial values, and passes on their gradient, which every device has."""

    @staticmethod
    def forward(_ctx: Any, part: torch.Tensor, sum_up: AllReduce) -> torch.Tensor:
        return sum_up(part.clone())

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """Makes logits of all words from each device's own, and passes on these words' gradients, which all have."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, share: Share, sum_up: AllReduce) -> torch.Tensor:
        width = logits.shape[-1]
        ctx.words = slice(share.rank * width, (share.rank + 1) * width)
        whole = logits.new_zeros(*logits.shape[:-1], share.degree * width)
        whole[..., ctx.words] = logits
        return sum_up(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0][..., ctx.words], None, None


class _Entrance:
    """Enters each input of a module's children cut by columns once, however many of them take it."""

    def __init__(self, sum_up: AllReduce, tokens: TokenShare | None) -> None:
        self._sum_up, self._tokens = sum_up, tokens
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        """The newest input, and the value that the children take."""

    def watch(self, module: nn.Module, eager: Callable[[Any], Any]) -> None:
        module.register_forward_hook(eager(self.leave))
        if self._tokens is not None:
            module.register_forward_pre_hook(eager(partial(self._gather, self._tokens)), with_kwargs=True)

    def _gather(self, tokens: TokenShare, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the module the hidden states of all tokens."""
        own = losses.cast_by_autocast(hidden_in(args, kwargs))
        whole = tokens.gather(own)
        # The module itself may use them too, as if it were on each device alone.
        self._entered = whole, tokens.enter(own, whole)
        return with_hidden(whole, args, kwargs)

    def enter(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = args
        # Modules with a common input share the sum of its gradient, so a block has two sums forward and two backward,
        # as in Megatron.
        if self._entered is None or self._entered[0] is not hidden:
            self._entered = hidden, _entered(hidden, self._sum_up)
        return (self._entered[1], *others)

    def leave(self, *_: object) -> None:
        # An input is kept for one call of the parent module only.
        self._entered = None


def _entered(hidden: torch.Tensor, sum_up: AllReduce) -> torch.Tensor:
    # Linear layers would cast their input themselves; a cast here has the gradient summed in the short type.
    return _Enter.apply(losses.cast_by_autocast(hidden), sum_up)  # type: ignore[no-any-return,no-untyped-call]


def _row_forward(module: Any, sum_up: AllReduce, tokens: TokenShare | None, hidden: torch.Tensor) -> torch.Tensor:
    """Run a linear layer cut by rows."""
    part = functional.linear(hidden, module.weight)
    output: torch.Tensor = _Leave.apply(part, sum_up) if tokens is None else tokens.leave(part)  # type: ignore[no-untyped-call]
    # The bias is whole on every device, so it must be added after the sum.
    return output if module.bias is None else output + module.bias


def _embedding_forward(module: Any, share: Share, sum_up: AllReduce, ids: torch.Tensor) -> torch.Tensor:
    """Look up tokens in an embedding cut by words."""
    words = module.weight.shape[0]
    own = ids - share.rank * words
    is_elsewhere = (own < 0) | (own >= words)
    padding = None if module.padding_idx is None else module.padding_idx - share.rank * words
    found = functional.embedding(
        own.masked_fill(is_elsewhere, 0), module.weight, padding if padding in range(words) else None
    )
    return _Leave.apply(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), sum_up)  # type: ignore[no-any-return,no-untyped-call]


def _head_forward(module: Any, share: Share, sum_up: AllReduce, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of all words, for whatever but the standard loss takes them."""
    logits = functional.linear(_entered(hidden, sum_up), module.weight, module.bias)
    return _Gather.apply(logits, share, sum_up)  # type: ignore[no-any-return,no-untyped-call]


def _styles(structure: ModelStructure, degree: int) -> tuple[dict[str, Style], bool]:
    """Choose the style of every module that is not left whole; return also whether tokens can be cut between them."""
    if structure.adapters is not None:
        raise _cannot(structure, "its plan does not cover adapters")
    if structure.hooks:
        raise _cannot(structure, f"the hook on {min(structure.hooks)} takes the whole gradient")
    model = structure.build(dtype=torch.float32)
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    patterns = [(re.compile(re.escape(glob).replace(r"\*", r"\d+")), style) for glob, style in plan.items()]
    found: dict[str, Style] = {}

    def planned(name: str) -> str | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    for name, module in model.named_modules():
        style = planned(name)
        if style is None or style in _WHOLE:
            continue
        if style not in list(Style) or (style != Style.SUMMED and type(module) is not nn.Linear):
            raise _cannot(structure, f"its plan has {style!r} for {name}, which is not supported")
        found[name] = Style(style)
    if not any(style is not Style.SUMMED for style in found.values()):
        raise _cannot(structure, "it has no plan for that")
    of_words = _styles_of_words(structure, model, planned, degree)
    # Devices would draw the same numbers for different tokens.
    draws = structure.draws_at_random and structure.drops
    cuts_tokens = structure.sequence_length % degree == 0 and not draws
    if cuts_tokens:
        columns, rows, others = (
            [name for name in found if found[name] is style] for style in (Style.COLUMNS, Style.ROWS, Style.SUMMED)
        )
        cuts_tokens = can_cut_tokens(structure, model, columns=columns, rows=rows, others=others)
    return found | of_words, cuts_tokens


def _styles_of_words(
    structure: ModelStructure, model: Any, planned: Callable[[str], str | None], degree: int
) -> dict[str, Style]:
    """Return whether embedding and head are cut by words. Both are, or neither, if they have one weight."""
    names = {module: name for name, module in model.named_modules()}
    weights = {site.module: site.parameter for layer in structure.sites for site in layer if site.attribute == "weight"}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    found: dict[str, Style] = {}
    if type(head) is nn.Linear and planned(names[head]) == Style.HEAD and head.out_features % degree == 0:
        found[names[head]] = Style.HEAD
    # Other classes scale what they look up, or do more.
    is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    is_plain = is_plain and not (embedding.scale_grad_by_freq or embedding.sparse)
    if is_plain and embedding.num_embeddings % degree == 0:
        found[names[embedding]] = Style.EMBEDDING
    of_both = {weights.get(names.get(each, "")) for each in (head, embedding)}
    return {} if len(found) == 1 and len(of_both) == 1 else found


def _cut_shape(structure: ModelStructure, name: str, dimension: int | None, degree: int) -> torch.Size:
    shape = list(structure.shapes[name])
    if dimension is not None:
        if shape[dimension] % degree:
            raise _cannot(structure, f"{name} has {shape[dimension]} features, which {degree} devices cannot share")
        shape[dimension] //= degree
    return torch.Size(shape)


def _require_whole_heads(structure: ModelStructure, degree: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(structure.config, key, None)
        if degree > 1 and isinstance(heads, int) and heads % degree:
            raise _cannot(structure, f"it has {heads} {key}, which {degree} devices cannot share")


def _cannot(structure: ModelStructure, why: str) -> ConfigError:
    return ConfigError(f"tensor_parallel: {structure.config.model_type} cannot be shared by devices: {why}")
