"""Experts of a mixture that stay on the devices of a sharded stage: tokens travel to them, and weights do not.

A sharded stage cuts parameters by their first dimension, which counts experts for the parameters of a mixture. So a
device has whole experts, and instead of putting the weights of all experts together, the devices send each token to
those that its router chooses, and their outputs back (Lepikhin et al., "GShard", 2020). This is done for the modules
for which the model's own plan says `ep_dispatch_experts`. Their gradients need no sum in the stage, as a device has
computed them from all devices' tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from oobleck.errors import ConfigError

from . import losses
from .structure import ModelStructure

_PLAN = "ep_dispatch_experts"
_TRIED = 2  # experts
_TOKENS = 5
_TOLERANCE = 1e-4


class Exchanging(Protocol):
    """Collectives of the devices of a stage."""

    def exchange(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send rows to each device, in the order of devices, and return those that all send here, in the same order.

        `counts[i][j]` says how many rows device i sends to device j.
        """


class Collectives(Exchanging, Protocol):
    """All of those that the devices of a stage have."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the devices, in place, and return it."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return what each device has: [devices, *own]."""

    def scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum [devices, ...] over the devices, and return this device's own row."""

    def read(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's numbers, as nested lists."""


def experts_of(structure: ModelStructure, *, degree: int) -> dict[str, frozenset[str]]:
    """Return the parameters of each module whose experts `degree` devices can share out, by the names of both.

    Raises ConfigError if the model's plan names no such module, or if tokens cannot be sent to one of them.
    """
    if structure.flow is not None or structure.whole_loss is not None:
        raise _cannot(structure, "its layers do not run one after the other")
    if structure.adapters is not None or structure.hooks:
        raise _cannot(structure, "adapters and hooks on gradients take whole parameters")
    model: Any = structure.build(dtype=torch.float32)
    patterns = [
        re.compile(re.escape(glob).replace(r"\*", r"\d+"))
        for glob, style in (getattr(model, "ep_plan", None) or {}).items()
        if style == _PLAN
    ]
    found = {name: module for name, module in model.named_modules() if any(each.fullmatch(name) for each in patterns)}
    if not found:
        raise _cannot(structure, "its plan names no experts")
    parameters: dict[str, set[str]] = {name: set() for name in found}
    for layer in structure.sites:
        for site in layer:
            owner = next((name for name in found if f"{site.module}.".startswith(f"{name}.")), None)
            if owner is not None:
                count, rows = found[owner].num_experts, structure.shapes[site.parameter][:1]
                if site.module != owner or site.is_buffer or rows != (count,):
                    raise _cannot(structure, f"{site.name} has not one row for each of {count} experts")
                parameters[owner].add(site.parameter)
    for name, module in found.items():
        if module.num_experts % degree:
            raise _cannot(structure, f"{name} has {module.num_experts} experts, which {degree} devices cannot share")
    _try(structure, *next(iter(found.items())))
    return {name: frozenset(each) for name, each in parameters.items()}


def experts_per_token(structure: ModelStructure) -> int:
    """Return to how many experts a token goes, by the model's configuration; 1 where that does not say."""
    found = (getattr(structure.config, key, None) for key in ("num_experts_per_tok", "experts_per_token", "top_k"))
    return next((number for number in found if isinstance(number, int)), 1)


def place_experts(module: Any, *, rank: int, degree: int, collectives: Collectives) -> None:
    """Have a module of experts, which holds those of one device, compute for the tokens of all devices."""
    own, compute = module.num_experts // degree, module.forward
    module.num_experts = own

    def forward(*arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        hidden, chosen, weights = (*arguments, *named.values())
        # Rows in the order of their experts, and so of the experts' devices.
        order = torch.argsort(chosen.reshape(-1), stable=True)
        of_experts = collectives.gather(torch.bincount(chosen.reshape(-1), minlength=degree * own))
        counts = collectives.read(of_experts.view(degree, degree, own).sum(-1))
        rows = losses.cast_by_autocast(hidden[torch.div(order, chosen.shape[1], rounding_mode="floor")])
        taken = exchanged(rows, counts, collectives)
        each = of_experts[:, rank * own : (rank + 1) * own].reshape(-1)
        experts = torch.arange(own, device=each.device).repeat(degree).repeat_interleave(each, output_size=len(taken))
        # One row more: a device to which no token goes takes part in all exchanges of the backward pass, as others do.
        computed = compute(
            torch.cat([taken, taken.new_zeros((1, taken.shape[1]))]),
            torch.cat([experts, experts.new_zeros(1)])[:, None],
            weights.new_ones((len(taken) + 1, 1)),
        )[:-1]
        back = exchanged(computed, [*zip(*counts, strict=True)], collectives)
        placed = torch.empty_like(back).index_copy(0, order, back).view(*chosen.shape, -1)
        return (placed * weights[..., None]).sum(1).to(hidden.dtype)

    module.forward = forward


def exchanged(rows: torch.Tensor, counts: Sequence[Sequence[int]], collectives: Exchanging) -> torch.Tensor:
    """Return what `exchange` does; gradients of it return to the devices that the rows came from."""
    return _Exchange.apply(rows, counts, collectives)  # type: ignore[no-any-return,no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: Sequence[Sequence[int]], collectives: Exchanging) -> Any:
        ctx.back, ctx.collectives = [*zip(*counts, strict=True)], collectives
        return collectives.exchange(rows.contiguous(), counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.collectives.exchange(gradients[0].contiguous(), ctx.back), None, None


def _try(structure: ModelStructure, name: str, module: Any) -> None:
    """Compare what a module computes with what `place_experts` makes of it, on a few of its experts."""
    tried = copy.copy(module)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tried._parameters = {
        name: nn.Parameter(drawn(_TRIED, *each.shape[1:])) for name, each in module.named_parameters(recurse=False)
    }
    tried.num_experts = _TRIED
    hidden, weights = drawn(_TOKENS, structure.hidden_size), drawn(_TOKENS, _TRIED)
    chosen = torch.stack([torch.randperm(_TRIED, generator=generator) for _ in range(_TOKENS)])
    try:
        with torch.no_grad():
            whole = tried(hidden, chosen, weights)
            alone = [tried(hidden, chosen[:, [at]], torch.ones_like(weights[:, [at]])) for at in range(_TRIED)]
        weighted = (torch.stack(alone, 1) * weights[..., None]).sum(1)
        fits = bool((whole - weighted).abs().max() <= _TOLERANCE * whole.abs().max())
    except losses.MISFITS as error:
        raise _cannot(structure, f"{name} cannot be called with tokens, experts and weights: {error}") from error
    if not fits:
        raise _cannot(structure, f"{name} computes something else than a weighted sum of its experts' outputs")


def _cannot(structure: ModelStructure, why: str) -> ConfigError:
    return ConfigError(
        f"expert_parallel: tokens cannot be sent to the experts of {structure.config.model_type}: {why}; leave it out"
    )
