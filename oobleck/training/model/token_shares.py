"""Hidden states between the shared modules of a stage, cut by tokens: sequence parallelism.

Norms and residual sums take each token by itself. So each device computes them for a share of a microbatch's tokens:
these are gathered before a module that the devices share, and its partial outputs are summed into shares, in place of a
sum that every device has whole (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022, section 4.2.2). That is as many bytes, and of all between these modules a share of the memory and of the time.

Tokens are cut across samples: a share of hidden states [batch, length, hidden] is [1, tokens, hidden].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .experts import Collectives
from .initialization import materialize_buffers, move_buffers
from .losses import MISFITS
from .structure import ModelStructure

_SHAPE = (3, 4)  # batch, length; no model takes a first dimension of 3, or of 1, for a pair
_DEGREE = 2
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of which one of the devices of a stage has hidden states."""

    rank: int
    degree: int
    length: int
    """Tokens of a sample."""
    collectives: Collectives

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this device's share of what all devices have."""
        return _Cut.apply(whole, self)  # type: ignore[no-any-return,no-untyped-call]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all tokens, for modules that each device computes whole."""
        return _Gather.apply(own, self)  # type: ignore[no-any-return,no-untyped-call]

    def enter(self, own: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return what was gathered for a module of which each device computes a part."""
        return _Enter.apply(own, whole.detach(), self)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, part: torch.Tensor) -> torch.Tensor:
        """Return this device's share of the sum of the devices' partial outputs."""
        return _Leave.apply(part, self)  # type: ignore[no-any-return,no-untyped-call]

    def shape_of(self, batch_size: int, hidden_size: int) -> tuple[int, int, int]:
        """Return the shape of this device's share of a microbatch's hidden states."""
        return 1, batch_size * self.length // self.degree, hidden_size

    def cut_before(self, is_whole: Callable[[], bool], module: nn.Module) -> None:
        """Have a module take this device's share where it is given hidden states of all tokens."""

        def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if is_whole():
                return with_hidden(self.cut(hidden_in(arguments, keywords)), arguments, keywords)
            return None

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def gather_before(self, is_tried: Callable[[], bool], module: nn.Module) -> None:
        """Have a module take the hidden states of all tokens."""

        def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if is_tried():
                return None
            return with_hidden(self.gather(hidden_in(arguments, keywords)), arguments, keywords)

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def own_of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(self.degree, -1, whole.shape[-1])[self.rank].unsqueeze(0)

    def whole_of(self, own: torch.Tensor) -> torch.Tensor:
        return self.collectives.gather(own.contiguous()).view(-1, self.length, own.shape[-1])

    def sum_of(self, part: torch.Tensor) -> torch.Tensor:
        return self.collectives.scatter(part.reshape(self.degree, -1, part.shape[-1])).unsqueeze(0)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, share: TokenShare) -> torch.Tensor:
        ctx.share = share
        return share.own_of(whole).clone()  # a view would keep the whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.share.whole_of(gradients[0]), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, share: TokenShare) -> torch.Tensor:
        ctx.share = share
        return share.whole_of(own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.share.own_of(gradients[0]), None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _own: torch.Tensor, whole: torch.Tensor, share: TokenShare) -> torch.Tensor:
        ctx.share = share
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.share.sum_of(gradients[0]), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, share: TokenShare) -> torch.Tensor:
        ctx.share = share
        return share.sum_of(part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.share.whole_of(gradients[0]), None


# --- whether a model's code allows it ----------------------------------------------------------------------


@torch.no_grad()
def can_cut_tokens(
    structure: ModelStructure, model: Any, *, columns: Collection[str], rows: Collection[str], others: Collection[str]
) -> bool:
    """Try a model's code on a few tokens: whether blocks do nothing to hidden states but token by token, except in the
    modules that have layers cut by `columns`, which return what layers cut by `rows` do.

    The plan says how devices share `others` too. `model` is on the meta device, and of no use afterwards. Takes about
    as long as building it.
    """
    shared = {name.rpartition(".")[0] for name in columns}
    roots, planned = tuple(f"{root}." for root in structure.blocks), {*columns, *rows, *others}

    def is_known(name: str, parameter: nn.Parameter) -> bool:
        module = name.rpartition(".")[0]
        if not name.startswith(roots) or module in planned:
            return True
        # Norms are all that a block may have beside its shared modules.
        return parameter.ndim == 1 and not any(name.startswith(f"{each}.") for each in shared)

    if not all(is_known(name, parameter) for name, parameter in model.named_parameters()):
        return False
    _prepare(structure, model, columns, rows)
    hidden = torch.randn((*_SHAPE, structure.hidden_size), generator=torch.Generator().manual_seed(0)).double()
    try:
        calls = _calls(structure, model, hidden, shared=shared, rows=rows)
        return calls is not None and all(
            _goes_by_tokens(model, root, calls, hidden, {name for name in shared if name.startswith(f"{root}.")})
            for root in structure.blocks
        )
    except MISFITS:
        return False


def _prepare(structure: ModelStructure, model: Any, columns: Collection[str], rows: Collection[str]) -> None:
    """Give a model's norms numbers, and its shared layers code that needs none."""
    model.to(torch.float64).eval()
    if structure.keeps_buffers:
        move_buffers(model, device=torch.device("cpu"))
    else:
        materialize_buffers(model, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if name in columns:
            module.forward = lambda hidden, width=module.out_features: hidden[..., :1].expand(*hidden.shape[:-1], width)
        elif name in rows:
            module.forward = lambda hidden, width=structure.hidden_size: (
                hidden.mean(-1, keepdim=True).expand(*hidden.shape[:-1], width).clone()
            )
        else:
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 1:
                    value = torch.randn(parameter.shape, generator=generator).double()
                    module._parameters[attribute] = nn.Parameter(value, requires_grad=False)


@dataclass(frozen=True, slots=True)
class _Call:
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any


def _calls(
    structure: ModelStructure, model: Any, hidden: torch.Tensor, *, shared: Set[str], rows: Collection[str]
) -> dict[str, _Call] | None:
    """Run the model; return what blocks and shared modules were called with, and returned, by their names.

    None unless each shared module returns what one of its own layers does.
    """
    calls: dict[str, _Call] = {}
    of_rows: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if name in rows:
                of_rows[name] = output
            else:
                calls[name] = _Call(arguments, keywords, output)

        return hook

    handles = [
        model.get_submodule(name).register_forward_hook(note(name), with_kwargs=True)
        for name in sorted({*structure.blocks, *shared, *rows})
    ]
    try:
        model.base_model(inputs_embeds=hidden, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    returned = {
        name: any(_first(calls[name].output) is each for row, each in of_rows.items() if row.startswith(f"{name}."))
        for name in shared & calls.keys()
    }
    return calls if len(returned) == len(shared) and all(returned.values()) and len(of_rows) == len(rows) else None


def _goes_by_tokens(model: Any, root: str, calls: Mapping[str, _Call], hidden: torch.Tensor, shared: Set[str]) -> bool:
    """Whether a block does the same to all tokens as to each share of them, with stand-ins for its shared modules."""
    for name in shared:
        output = calls[name].output
        rest = output[1:] if isinstance(output, tuple) else None

        def stand_in(*arguments: Any, rest: Any = rest, **keywords: Any) -> Any:
            halved = 0.5 * hidden_in(arguments, keywords)
            return halved if rest is None else (halved, *rest)

        model.get_submodule(name).forward = stand_in
    call, block = calls[root], model.get_submodule(root)

    def run(given: torch.Tensor) -> torch.Tensor:
        if call.arguments:
            return _first(block(given, *call.arguments[1:], **call.keywords))
        return _first(block(**{**call.keywords, next(iter(call.keywords)): given}))

    whole = run(hidden)
    parts = [run(part.unsqueeze(0)) for part in hidden.reshape(_DEGREE, -1, hidden.shape[-1])]
    return torch.allclose(torch.cat(parts, 1).view_as(whole), whole, rtol=_TOLERANCE, atol=_TOLERANCE)


def with_hidden(hidden: torch.Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return a module's arguments with other hidden states."""
    if arguments:
        return (hidden, *arguments[1:]), keywords
    return (), {**keywords, next(iter(keywords)): hidden}


def hidden_in(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states among a module's arguments, which come first."""
    hidden: torch.Tensor = arguments[0] if arguments else next(iter(keywords.values()))
    return hidden


def _first(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
