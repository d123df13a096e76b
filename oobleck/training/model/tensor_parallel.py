"""Tensor parallelism inside a stage: the devices of a node share every layer, by the model's own plan.

A transformers model says of its linear layers whether they are cut by columns or by rows. Between a layer cut by
columns and the one cut by rows that follows, each device computes its share of the features; before, all have the
same values, and after, their shares are summed (Shoeybi et al., "Megatron-LM", 2019, section 3). What the plan cuts
in other ways (embeddings, heads) stays whole on every device.

Modules cut by columns that take the same input enter it together: two sums forward and two backward a block, as in
Megatron, and each in the type that is computed in.

Sums are interruptible, unlike torch's own (DTensor's run in a group that no worker can leave): when a pipeline breaks,
the devices of a stage may notice it at different moments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oobleck.errors import ConfigError

from .models import StageModel
from .structure import ModelStructure

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the devices of the stage, in place, and returns it."""


class Style(StrEnum):
    """How a module is shared; the values are transformers' words."""

    COLUMNS = "colwise"
    ROWS = "rowwise"
    SUMMED = "replicated_with_grad_allreduce"
    """Whole on every device, and used for that device's features alone: its gradients are summed."""


_WHOLE = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "embedding_rowwise")
"""Styles that may as well be left out: the module is as a whole to those around it."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of the devices of a stage holds of the model."""

    rank: int
    degree: int
    structure: ModelStructure
    """With the shapes of the shares."""
    styles: Mapping[str, Style]
    """By module."""
    cut_dimensions: Mapping[str, int]
    """By parameter: the dimension along which it is cut."""
    summed: frozenset[str]
    """Parameters that are whole here, and whose gradients are not."""

    def is_whole(self, parameter: str) -> bool:
        """Return whether all devices of a stage have the same gradient of this parameter."""
        return parameter not in self.cut_dimensions and parameter not in self.summed

    def part_of(self, parameter: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this device's share of a whole parameter."""
        if (dimension := self.cut_dimensions.get(parameter)) is None:
            return whole
        return whole.chunk(self.degree, dimension)[self.rank]


def share_of(structure: ModelStructure, *, rank: int, degree: int) -> Share:
    """Cut a model by its own plan. Raises ConfigError where it has none, or does not divide by `degree`."""
    styles = _styles(structure) if degree > 1 else {}
    cut: dict[str, int] = {}
    summed: set[str] = set()
    for site in (site for layer in structure.sites for site in layer):
        style = styles.get(site.module)
        if style is Style.SUMMED:
            summed.add(site.parameter)
        elif style is Style.COLUMNS or (style is Style.ROWS and site.attribute == "weight"):
            cut[site.parameter] = 0 if style is Style.COLUMNS else 1
    shapes = {name: _cut_shape(structure, name, cut.get(name), degree) for name in structure.shapes}
    _require_whole_heads(structure, degree)
    return Share(
        rank=rank,
        degree=degree,
        structure=replace(structure, shapes=shapes),
        styles=styles,
        cut_dimensions=cut,
        summed=frozenset(summed),
    )


def install(stage: StageModel, share: Share, sum_up: AllReduce) -> None:
    """Have the modules of a stage compute this device's share. `stage` is of the share's structure."""
    for layer in range(share.structure.num_layers):
        for root, module in zip(share.structure.layer_roots(layer), stage.modules_of(layer), strict=True):
            named = dict(module.named_modules(prefix=root))
            entrances: dict[str, _Entrance] = {}
            for name, inner in named.items():
                match share.styles.get(name):
                    case Style.COLUMNS:
                        parent = name.rpartition(".")[0]
                        if parent not in entrances:
                            entrances[parent] = _Entrance(sum_up)
                            named[parent].register_forward_hook(entrances[parent].leave)
                        inner.register_forward_pre_hook(entrances[parent].enter)
                    case Style.ROWS:
                        inner.forward = partial(_row_forward, inner, sum_up)


def initialize_share(
    stage: StageModel, share: Share, whole: ModelStructure, layers: Iterable[int], *, seed: int
) -> None:
    """Set held layers to their share of the initial values, which are those of the whole model, layer by layer."""
    source = StageModel(whole, dtype=stage.dtype, device=stage.device)
    for layer in layers:
        source.adopt(layer, layer + 1, {})
        source.initialize([layer], seed=seed)
        with torch.no_grad():
            for name, parameter in source.parameters.items():
                stage.parameters[name].copy_(share.part_of(name, parameter))


class _Enter(torch.autograd.Function):
    """The same values on every device, of whose gradient each has a part."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, sum_up: AllReduce) -> torch.Tensor:
        ctx.sum_up = sum_up
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.sum_up(gradients[0].clone()), None


class _Leave(torch.autograd.Function):
    """Parts of values on every device, summed; their gradient is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, sum_up: AllReduce) -> torch.Tensor:
        del ctx
        return sum_up(part.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return gradients[0], None


class _Entrance:
    """Where one module's own modules cut by columns enter what they take, each input once."""

    def __init__(self, sum_up: AllReduce) -> None:
        self._sum_up = sum_up
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        """The newest input, and what was made of it."""

    def enter(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A module's hook before its forward pass."""
        hidden, *others = args
        if self._entered is None or self._entered[0] is not hidden:
            # Linear layers cast what they take; done here, the gradient is summed in the short type as well.
            kind = hidden.device.type
            cast = hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden
            self._entered = hidden, _Enter.apply(cast, self._sum_up)  # type: ignore[no-untyped-call]
        return (self._entered[1], *others)

    def leave(self, *_: object) -> None:
        """The hook after the forward pass of the module that they are in: keep nothing alive."""
        self._entered = None


def _row_forward(module: Any, sum_up: AllReduce, hidden: torch.Tensor) -> torch.Tensor:
    """A linear layer cut by rows: the bias belongs to the sum."""
    output: torch.Tensor = _Leave.apply(functional.linear(hidden, module.weight), sum_up)  # type: ignore[no-untyped-call]
    return output if module.bias is None else output + module.bias


def _styles(structure: ModelStructure) -> dict[str, Style]:
    """Read the model's plan: the style of every module that is not left whole."""
    if structure.adapters is not None:
        raise _cannot(structure, "its plan says nothing of adapters")
    if structure.hooks:
        raise _cannot(structure, f"the hook on {min(structure.hooks)} is for the whole of it")
    model = structure.build(dtype=torch.float32)
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    patterns = [(re.compile(re.escape(glob).replace(r"\*", r"\d+")), style) for glob, style in plan.items()]
    found: dict[str, Style] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is None or style in _WHOLE:
            continue
        if style not in list(Style) or (style != Style.SUMMED and type(module) is not nn.Linear):
            raise _cannot(structure, f"its plan has {style!r} for {name}, which is not known here")
        found[name] = Style(style)
    if not any(style is not Style.SUMMED for style in found.values()):
        raise _cannot(structure, "it has no plan for that")
    return found


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
