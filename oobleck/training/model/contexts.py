"""Long contexts: devices of a sharded stage that compute a part of each sample's tokens each.

Except in attention, a model goes token by token. For attention, the devices exchange queries, keys and values of all
heads for their own tokens into those of their own heads for all tokens, and its outputs the other way round (Jacobs et
al., "DeepSpeed Ulysses", 2023). So a device has a part of all activations, and attention is the model's own, causal and
with windows.

A trial shows whether a model is like this: each kind of its layers computes a sample in one piece, and then in parts,
each of which is given what attention has returned for the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from oobleck.errors import ConfigError
from oobleck.training.data import Batch
from oobleck.training.randomness import MicrobatchKey

from . import losses
from .experts import Exchanging, exchanged
from .forward_passes import uncompiled, use_attention, use_plain_experts
from .models import StageModel
from .structure import ModelStructure

_KEEPER = "oobleck_attention"
"""The attribute by which modules find who computes their attention."""
_ROTARY = ("dynamic", "longrope")
"""Tables of rotary positions that depend on how long a sample is."""
_PARTS, _TOKENS = 2, 3
_TOLERANCE = 1e-4
_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)


class _Attention(Protocol):
    def attend(
        self,
        module: nn.Module,
        states: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return [batch, tokens, heads, features] for queries, keys and values [batch, heads, tokens, features]."""


@dataclass(frozen=True, slots=True)
class ContextShare:
    """The part of each sample's tokens that one of the devices of a stage computes."""

    rank: int
    num_devices: int
    """Devices of the stage."""
    degree: int
    """Devices that share a sample: those of ranks 0 to degree - 1 share one, those after them the next, and so on."""
    collectives: Exchanging

    def attend(
        self,
        module: nn.Module,
        states: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Compute attention of the own tokens, together with the other devices that share a sample."""
        query, *others = map(losses.cast_by_autocast, states)
        grouped = query.shape[1] // others[0].shape[1]
        # Fewer heads of keys than devices: each gets one that it shares with others.
        repeats = max(1, self.degree // others[0].shape[1])
        others = [each.repeat_interleave(repeats, dim=1) for each in others]
        output = _computed(_Grouped(module, grouped // repeats), self._by_heads([query, *others]), mask, options)
        return self._by_tokens(output)

    def _by_heads(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give up heads, and get the other tokens of the own ones."""
        for_devices = zip(*(each.chunk(self.degree, dim=1) for each in states), strict=True)
        rows = torch.stack([torch.cat([each.reshape(-1) for each in of_device]) for of_device in for_devices])
        taken = torch.split(self._exchanged(rows), [each.numel() // self.degree for each in states], dim=1)
        shapes = [(each.shape[0], each.shape[1] // self.degree, *each.shape[2:]) for each in states]
        return [
            piece.view(self.degree, *shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for piece, shape in zip(taken, shapes, strict=True)
        ]

    def _by_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Give up tokens, and get the other heads of the own ones."""
        batch, tokens = output.shape[:2]
        parts = output.view(batch, self.degree, tokens // self.degree, *output.shape[2:]).transpose(0, 1)
        taken = self._exchanged(parts.reshape(self.degree, -1)).view(parts.shape)
        return taken.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        devices = range(self.num_devices)
        counts = [[int(one // self.degree == other // self.degree) for other in devices] for one in devices]
        return exchanged(rows, counts, self.collectives)


def share_contexts(stage: StageModel, share: ContextShare) -> None:
    """Have a stage compute parts of samples (`Batch.part`), and its attention over all tokens."""
    _use(stage, share.degree, share)
    stage.computes_parts = True


def require_shared_contexts(structure: ModelStructure, *, degree: int, attention: str | None) -> None:
    """Raise ConfigError unless devices can share the tokens of a model's samples."""
    why = _why_not(structure, degree)
    if why is None:
        stage = StageModel(structure, dtype=torch.float32, device="cpu", attention=attention)
        config: Any = stage.model.config
        if not isinstance(stage.model, PreTrainedModel) or config._attn_implementation != "sdpa":
            why = "its attention is not computed by sdpa"
        else:
            try:
                why = _try(stage, degree)
            except ConfigError:
                why = "its attention can be computed by nothing but its own code"
            except losses.MISFITS as error:
                why = " ".join(str(error).split())
    if why is not None:
        raise ConfigError(
            f"context_parallel: devices cannot share the samples of {structure.config.model_type}: {why}; leave it out"
        )


def _why_not(structure: ModelStructure, degree: int) -> str | None:
    rotary = getattr(structure.config, "rope_parameters", None) or {}
    tables = [rotary, *(each for each in rotary.values() if isinstance(each, Mapping))]
    if structure.flow is not None or structure.whole_loss is not None or structure.is_whole:
        return "its layers do not run one after the other"
    if structure.task != "causal_lm" or structure.compute_loss is not None or structure.loss_rule.is_mean:
        return "its loss is not the standard one of causal language models"
    if structure.draws_at_random and structure.drops:
        return "it has dropout, which would depend on the devices; set `dropout: false`"
    if structure.sequence_length % degree:
        return f"data.sequence_length: {structure.sequence_length} is no multiple of {degree}"
    if "position_ids" not in structure.takes:
        return "it takes no position_ids"
    if any(each.get("rope_type") in _ROTARY for each in tables):
        return "its rotary positions depend on the length of a sample"
    return None


# --- attention by transformers' interface ------------------------------------------------------------------


def _use(stage: StageModel, degree: int, keeper: _Attention) -> None:
    name = f"oobleck_contexts_{degree}"

    def mask_of(*, q_length: int, kv_length: int, **options: Any) -> torch.Tensor | None:
        return sdpa_mask(q_length=degree * q_length, kv_length=degree * kv_length, **options)

    AttentionInterface.register(name, uncompiled(_attend) if stage.compiles else _attend)
    AttentionMaskInterface.register(name, mask_of)
    use_attention(stage.model, name)
    for layer in range(stage.structure.num_layers):
        for module in stage.modules_of(layer):
            for inner in module.modules():
                vars(inner)[_KEEPER] = keeper


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    keeper: _Attention = vars(module)[_KEEPER]
    return keeper.attend(module, (query, key, value), attention_mask, options), None


class _Grouped:
    """A module as attention sees it, with another number of queries for each head of keys."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _computed(
    module: Any, states: Sequence[torch.Tensor], mask: torch.Tensor | None, options: Mapping[str, Any]
) -> torch.Tensor:
    query, key, value = states
    output, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    return output


# --- whether a model's code allows it ----------------------------------------------------------------------


class _Differs(ValueError):
    pass


@dataclass(slots=True)
class _Replay:
    """Notes the calls of attention over whole samples, and answers from them those over a part."""

    degree: int
    part: slice | None = None
    calls: list[tuple[tuple[torch.Tensor, ...], torch.Tensor | None, torch.Tensor]] = field(default_factory=list)
    num_answered: int = 0

    def attend(
        self,
        module: nn.Module,
        states: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        if self.part is None:
            self._require_known(states, mask, options)
            self.calls.append((tuple(states), mask, _computed(module, states, mask, options)))
            return self.calls[-1][2]
        whole, whole_mask, output = self.calls[self.num_answered]
        self.num_answered += 1
        parts = [each[:, :, self.part] for each in whole]
        is_same_mask = (mask is None) == (whole_mask is None) and (
            mask is None or whole_mask is None or torch.equal(mask, whole_mask)
        )
        if not is_same_mask or not all(map(_are_close, states, parts)):
            raise _Differs("its attention would be another")
        return output[:, self.part]

    def _require_known(
        self, states: Sequence[torch.Tensor], mask: torch.Tensor | None, options: Mapping[str, Any]
    ) -> None:
        unknown = [name for name, each in options.items() if isinstance(each, torch.Tensor) and name != "position_ids"]
        if mask is not None and mask.shape[1] != 1:
            unknown.append("a mask")
        if unknown:
            raise _Differs(f"its attention takes {', '.join(unknown)} for all heads at once")
        queries, keys = states[0].shape[1], states[1].shape[1]
        if queries % self.degree or (keys % self.degree and self.degree % keys):
            raise _Differs(f"{self.degree} devices cannot share its {queries} heads of queries and {keys} of keys")


def _try(stage: StageModel, degree: int) -> str | None:
    structure = stage.structure
    stage.computes_parts = True
    use_plain_experts(stage.model)  # others take no numbers such as `_values`
    generator = torch.Generator().manual_seed(0)
    length = _PARTS * _TOKENS
    ids = torch.randint(0, structure.config.vocab_size, (2, length), generator=generator)
    batch = Batch(input_ids=ids, labels=ids)
    received = torch.randn((2, length, structure.hidden_size), generator=generator)
    kinds: dict[object, int] = {}
    for layer in range(structure.num_layers):
        kinds.setdefault(structure.layer_kind(layer), layer)
    for layer in kinds.values():
        names = structure.layer_parameters(layer)
        state = {name: _values(structure.shapes[name], generator) for name in names}
        stage.adopt(layer, layer + 1, state)
        if layer == structure.num_layers - 1:
            return None if stage.can_compute_loss_of_parts() else "its loss is not that of its head's logits alone"
        if (why := _why_not_by_parts(stage, degree, batch, received if layer else None, generator)) is not None:
            return f"what {structure.layer_names[layer]} computes of a token depends on {why}"
    raise AssertionError("a model has a last layer, which is like no other")


@torch.no_grad()
def _why_not_by_parts(
    stage: StageModel, degree: int, batch: Batch, received: torch.Tensor | None, generator: torch.Generator
) -> str | None:
    for module in stage.modules_of(stage.layers[0]):
        for inner in module.modules():
            if type(inner) in (nn.Linear, Conv1D):
                _lighten(inner, generator)
    replay = _Replay(degree)
    _use(stage, 1, replay)
    usual = stage.forward(batch, received, num_items=1, key=_KEY)
    replay.calls.clear()
    whole = stage.forward(batch.part(0, 1), received, num_items=1, key=_KEY)
    # A part says its positions, which a model left alone may count otherwise: from another number, or without padding.
    if not _are_close(usual, whole):
        return "positions other than 0, 1, 2, and so on"
    _use(stage, _PARTS, replay)
    for index in range(_PARTS):
        replay.part, replay.num_answered = slice(index * _TOKENS, (index + 1) * _TOKENS), 0
        own = None if received is None else received[:, replay.part]
        output = stage.forward(batch.part(index, _PARTS), own, num_items=1, key=_KEY)
        if replay.num_answered != len(replay.calls) or not _are_close(output, whole[:, replay.part]):
            return "others, beside attention"
    return None


def _values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return numbers of a shape, no two rows of which are alike, in the memory of the sum of its dimensions."""
    # Rows of a single number each would be zeros after a norm.
    return torch.randn(1 + sum(size - 1 for size in shape), generator=generator).as_strided(shape, [1] * len(shape))


def _lighten(module: Any, generator: torch.Generator) -> None:
    """Give a linear layer code that needs neither its weights nor their memory."""
    width = module.nf if isinstance(module, Conv1D) else module.out_features
    factors = torch.randn(width, generator=generator) / width**0.5

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        summed = (hidden * torch.linspace(-1.0, 1.0, hidden.shape[-1])).sum(-1, keepdim=True)
        return torch.mul(summed, factors)

    vars(module)["forward"] = forward


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)
