"""Losses of models: in the precision of their logits, by chunks where these are many, and the check of a script's own.

Samples are spread over microbatches and nodes, whose losses are added up. So a loss must be a sum over samples divided
by its argument, the number of items in the step. A mean, or weights that depend on the other samples, would make the
result depend on the plan.

Of 8,192 tokens and 128,256 words the logits alone take 2 GB in bfloat16, and with their copies in float32 and their
gradients 16 GB. `ChunkedLoss` has a chunk of tokens pass head and loss in both directions before the next one begins,
so that only the gradients of the head's input and weight are kept (as in Hsu et al., "Liger Kernel", 2024). Devices
that share a head have the logits of their own words, and sum one number a token for each of them, and one more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from oobleck.errors import ConfigError
from oobleck.training.data import IGNORED_LABEL, Batch

_TOLERANCE, _ROUNDING = 1e-3, 1e-6
_OF_LOGITS = (0.01, 8.0)
"""Factors of made-up logits: nearly equal ones, as a new model has, and ones that are far apart."""
_SMALL_LOSSES = (0.5, 0.02)
"""Losses of a token that a model reaches once it has learned its samples."""

MISFITS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model's own code may raise where it meets other modules, arguments or outputs than it is used to."""

Loss = Callable[[Any, torch.Tensor, int], torch.Tensor]
"""Maps outputs, labels and the number of items in a step to a microbatch's share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """The normalization of a model's own loss, and the labels that count."""

    is_mean: bool = False
    """Whether it is the mean over the counted labels; else it is their sum divided by `num_items_in_batch`."""
    counts_first: bool = False
    """Whether each sample's first label counts, because the model does not shift labels."""

    def __str__(self) -> str:
        what = "the mean" if self.is_mean else "a sum divided by num_items_in_batch,"
        return f"{what} over all labels{'' if self.counts_first else ' but the first'}"


def causal_lm_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: int | None = None, **_options: Any
) -> torch.Tensor:
    """Return the sum of the token losses over `num_items_in_batch` (their mean without it), in the logits' dtype.

    Like transformers' own, with the same arguments, but without its conversion to float32. `logits` are
    [batch, length, vocabulary], `labels` [batch, length] and not shifted.
    """
    predictions = logits[:, :-1].reshape(-1, vocab_size)
    targets = labels[:, 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(predictions, targets, ignore_index=IGNORED_LABEL, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


@dataclass(frozen=True, slots=True)
class _Call:
    """What a model's code gave its loss function."""

    logits: torch.Tensor
    labels: torch.Tensor
    options: Mapping[str, Any]


class _TrunkOutput(BaseModelOutput):
    """An output that lacks whatever else a trunk may return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The words of a head that one of the devices of a stage has."""

    rank: int
    degree: int
    sum_up: Callable[[torch.Tensor], torch.Tensor]
    """Sums a tensor over these devices, in place, and returns it."""


def cast_by_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a linear layer takes it."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


class _SharedCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of tokens, from the logits [tokens, words] of this device's words alone."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, share: VocabularyShare) -> torch.Tensor:
        words = logits.shape[1]
        own = targets - share.rank * words
        is_elsewhere = (own < 0) | (own >= words)
        own = own.masked_fill(is_elsewhere, 0).unsqueeze(1)
        # What each device knows of its words, and one of the target, in one sum.
        known = logits.new_zeros(share.degree + 1, len(logits))
        known[share.rank] = logits.logsumexp(1)
        known[share.degree] = logits.gather(1, own).squeeze(1).masked_fill(is_elsewhere, 0.0)
        share.sum_up(known)
        total = known[:-1].logsumexp(0)
        is_ignored = targets == IGNORED_LABEL
        ctx.save_for_backward(logits, total, own, is_elsewhere, is_ignored)
        return (total - known[-1]).masked_fill(is_ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, total, own, is_elsewhere, is_ignored = ctx.saved_tensors
        of_logits = (logits - total.unsqueeze(1)).exp_()
        of_logits.scatter_add_(1, own, is_elsewhere.to(logits.dtype).sub_(1.0).unsqueeze(1))
        return of_logits.masked_fill_(is_ignored.unsqueeze(1), 0.0).mul_(gradients[0]), None, None


class ChunkedLoss:
    """Computes the loss of a model whose code gives its head's logits to the standard loss, and to nothing else."""

    def __init__(self, model: PreTrainedModel, head: nn.Linear, max_logits: int, share: VocabularyShare | None) -> None:
        self._model: Any = model
        self._head: Any = head
        self._share = share
        self._shared_forward = None if share is None else vars(head)["forward"]
        self._chunk = max(
            1, max_logits // head.out_features
        )  # tokens, also for a device that has a share of their logits

    @classmethod
    def of(cls, model: nn.Module, *, max_logits: int, share: VocabularyShare | None = None) -> ChunkedLoss | None:
        """Return that of a model with its head in place; None where it would not compute what the model does.

        `share` says which words the head has; None for all.
        """
        if not isinstance(model, PreTrainedModel) or model.base_model is model:
            return None
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        is_standard = model.loss_function in (ForCausalLMLoss, causal_lm_loss)
        if not is_standard or type(head) is not nn.Linear:
            return None
        chunked = cls(model, head, max_logits, share)
        return chunked if chunked._passes_logits_on() else None

    def is_watched(self) -> bool:
        """Return whether a hook, or another forward of the head, would see what is no longer there."""
        head: Any = self._head
        hooks = (head._forward_hooks, head._backward_hooks, head._backward_pre_hooks, self._model._forward_hooks)
        of_parameters = (parameter._backward_hooks for parameter in head.parameters())
        return vars(head).get("forward") is not self._shared_forward or any(hooks) or any(of_parameters)

    def loss(self, batch: Batch, num_items: int, *, scale: float, **inputs: Any) -> torch.Tensor:
        """Return the sum of the token losses over `num_items`, as the model would.

        Gradients are computed at once, already multiplied by `scale`, by which the caller multiplies the loss's own:
        the small ones of float16 would vanish before.
        """
        computed: list[torch.Tensor] = []
        taken: list[torch.Tensor] = []

        def compute(call: _Call) -> torch.Tensor:
            computed.append(self._by_chunks(taken[0], call.labels, num_items, scale))
            return computed[0]

        with self._instead(taken, compute):
            outputs = self._model(labels=batch.labels, num_items_in_batch=num_items, **inputs)
        is_passed_on = outputs.loss is computed[0]
        assert is_passed_on, "as it was when this was tried"
        return computed[0]

    def _by_chunks(self, hidden: torch.Tensor, labels: torch.Tensor, num_items: int, scale: float) -> torch.Tensor:
        # A part is a leaf, as a weight is: autocast would cast it, and keep it with its cast until the end of the step.
        head, share, rows = self._head, self._share, cast_by_autocast(hidden.reshape(-1, hidden.shape[-1]))
        # Parts of samples come with the label that their last token predicts.
        targets = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1 : 1 + hidden.shape[1]].reshape(-1)
        trained = [each for each in (head.weight, head.bias) if each is not None and each.requires_grad]
        wanted = torch.is_grad_enabled() and (hidden.requires_grad or bool(trained))
        sums: list[torch.Tensor | None] = [None] * len(trained)
        of_rows = torch.empty_like(rows) if wanted and hidden.requires_grad else None
        total: torch.Tensor | None = None
        for first in range(0, len(rows), self._chunk):
            chunk = slice(first, first + self._chunk)
            part = rows[chunk].detach().requires_grad_(of_rows is not None)
            logits = nn.Linear.forward(head, part)
            if logits.dtype != torch.float64:
                logits = logits.float()
            loss = self._loss_of(logits, targets[chunk])
            total = loss.detach() if total is None else total + loss.detach()
            if not wanted:
                continue
            inputs = [*trained, *([part] if of_rows is not None else [])]
            # Backward passes run outside autocast.
            with torch.autocast(hidden.device.type, enabled=False):
                gradients = torch.autograd.grad(loss / num_items, inputs, torch.full_like(loss, scale))
            if of_rows is not None:
                of_rows[chunk] = gradients[-1]
            for at in range(len(trained)):
                known = sums[at]
                sums[at] = gradients[at] if known is None else known.add_(gradients[at])
            del logits, loss, gradients
        assert total is not None
        total = total / num_items
        if not wanted:
            return total
        if of_rows is not None and share is not None:
            of_rows = share.sum_up(of_rows)
        of_hidden = None if of_rows is None else of_rows.view(hidden.shape)
        return _Computed.apply(total, scale, [of_hidden, *sums], hidden, *trained)  # type: ignore[no-any-return,no-untyped-call]

    def _loss_of(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._share is not None:
            return _SharedCrossEntropy.apply(logits, targets, self._share)  # type: ignore[no-any-return,no-untyped-call]
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum")

    def _passes_logits_on(self) -> bool:
        """Try the model's code around its trunk: whether head and loss meet, and nothing comes between or after."""
        # Without values: weights may have no memory now, and be of any type and on any device.
        model, ids = self._model, torch.zeros((1, 2), dtype=torch.int64, device="meta")
        weight = self._head.weight
        hidden = torch.zeros((1, 2, self._head.in_features), dtype=weight.dtype, device="meta")
        named = chain(model.named_parameters(), model.named_buffers())
        without_values = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
        taken: list[torch.Tensor] = []
        calls: list[_Call] = []
        lost = torch.tensor(1.5)

        def note(call: _Call) -> torch.Tensor:
            calls.append(call)
            return lost

        trunk = model.base_model
        before = vars(trunk).get("forward")
        vars(trunk)["forward"] = lambda *_args, **_kwargs: _TrunkOutput(last_hidden_state=hidden)
        try:
            with torch.no_grad(), self._instead(taken, note) as stand_ins:
                arguments = {"input_ids": ids, "labels": ids, "num_items_in_batch": 2, "use_cache": False}
                outputs: Any = torch.func.functional_call(model, without_values, (), arguments)
        except MISFITS:
            return False
        finally:
            del vars(trunk)["forward"]
            if before is not None:
                vars(trunk)["forward"] = before
        if len(taken) != 1 or len(calls) != 1 or taken[0].shape != hidden.shape:
            return False
        (call,) = calls
        is_plain = call.options == {"vocab_size": self._head.out_features, "num_items_in_batch": 2}
        is_passed = call.logits is stand_ins[0] and call.labels is ids
        return is_plain and is_passed and outputs.loss is lost and lost.item() == 1.5

    @contextmanager
    def _instead(self, taken: list[torch.Tensor], compute: Any) -> Iterator[list[torch.Tensor]]:
        """Within the block, the head takes what it is given and returns a stand-in, and `compute` is the loss.

        Yields the stand-ins.
        """
        head, model = self._head, self._model
        own = vars(model).get("_loss_function")
        stand_ins: list[torch.Tensor] = []

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            taken.append(hidden)
            # It has the shape of the logits, and no memory.
            stand_ins.append(hidden.detach().new_zeros(()).expand(*hidden.shape[:-1], head.out_features))
            return stand_ins[-1]

        def loss_function(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> Any:
            return compute(_Call(logits, labels, {"vocab_size": vocab_size, **options}))

        head.forward, model.loss_function = forward, loss_function
        try:
            yield stand_ins
        finally:
            del head.forward, model._loss_function
            if own is not None:
                model._loss_function = own
            if self._shared_forward is not None:
                head.forward = self._shared_forward


class _Computed(torch.autograd.Function):
    """A loss whose gradients are known, as multiples of `scale`."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, scale: float, gradients: list[torch.Tensor | None], *_inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.scale, ctx.gradients = scale, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        factor = gradients[0] / ctx.scale
        known, ctx.gradients = ctx.gradients, None
        # Autograd casts that of hidden states, which is in the type that is computed in.
        return None, None, None, *(each if each is None else each.mul_(factor) for each in known)


def label_loss(logits: torch.Tensor, labels: torch.Tensor, num_items: int) -> torch.Tensor:
    """Return the sum of the losses of labelled tokens or samples over `num_items`, in the logits' dtype.

    `logits` have one dimension more than `labels`. Models take the mean over the microbatch instead, and such means do
    not add up.
    """
    predictions, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return functional.cross_entropy(predictions, targets, ignore_index=IGNORED_LABEL, reduction="sum") / num_items


def loss_of_outputs(compute: Callable[..., torch.Tensor]) -> Loss:
    """Return a `Trainer(compute_loss_func=…)` function as a `Loss`."""

    def loss_of(outputs: Any, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        # transformers' Trainer passes a tensor too, so scripts may use it as one.
        return compute(outputs, labels, num_items_in_batch=torch.tensor(num_items, device=labels.device))

    return loss_of


def tried_at_first(loss: Loss, given: object, *, argument: str = "num_items_in_batch") -> Loss:
    """Return a loss that raises ConfigError on its first microbatch if its values there do not add up.

    `given` is the script's own function, whose name for the number of items is `argument`.
    """
    is_tried = False

    def compute(outputs: Any, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        nonlocal is_tried
        if not is_tried and (fault := fault_of_loss(loss, outputs, labels, num_items=num_items)) is not None:
            raise ConfigError(unfit_loss(given, fault, argument=argument))
        is_tried = True
        return loss(outputs, labels, num_items)

    return compute


@torch.no_grad()
def fault_of_loss(
    compute: Loss, outputs: Any, labels: torch.Tensor, *, num_items: int, size: int | None = None
) -> str | None:
    """Describe how a loss differs from a sum over samples divided by `num_items`; None if it is one.

    The first sample is compared with the others, or, with `size`, all microbatches of that many. Raises what `compute`
    raises.
    """
    count = len(labels)

    def loss_of(first: int, stop: int, num_items: int) -> float:
        # Copies: a loss may work in place.
        return float(compute(_rows(outputs, first, stop, count), labels[first:stop].clone(), num_items))

    together, halved = loss_of(0, count, num_items), loss_of(0, count, 2 * num_items)
    if not is_same(again := loss_of(0, count, num_items), together):
        return f"of the same {count} samples it returns {again:g} when it runs again, after {together:g}"
    # A mean over the labels of the call ignores the number of items.
    if not is_near(2 * halved, together):
        return f"of twice as many items it returns {halved:g}, and of these {together:g}"
    if count < 2:
        return None
    cuts = [0, 1, count] if size is None else [*range(0, count, size), count]
    shares = [loss_of(first, stop, num_items) for first, stop in pairwise(cuts)]
    if is_near(sum(shares), together):
        return None
    parts = f"the first alone {shares[0]:g} and of the others {shares[1]:g}"
    if size is not None:
        parts = f"microbatches of {size} {sum(shares):g} in all"
    return f"of {count} samples it returns {together:g}, and of {parts}"


def of_other_sizes(outputs: Any, labels: torch.Tensor) -> Iterator[Any]:
    """Yield outputs as they are, and others for which losses are about as large as at first, small, and large."""
    yield outputs
    logits = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        return
    for scale in _OF_LOGITS:
        yield _with_logits(outputs, scale * logits)
    if labels.shape != logits.shape[:-1]:
        return
    # A token's logits may be for its own label or for that of the next.
    for ahead in range(min(labels.ndim, 2)):
        wanted = labels.roll(-ahead, -1).clamp(min=0, max=logits.shape[-1] - 1)
        is_wanted = functional.one_hot(wanted, logits.shape[-1])
        for loss in _SMALL_LOSSES:
            # Where the other logits are equal, the cross entropy of the wanted one is about vocabulary · exp(-margin).
            margin = math.log(logits.shape[-1] / loss)
            yield _with_logits(outputs, _OF_LOGITS[0] * logits + margin * is_wanted)


def _with_logits(outputs: Any, logits: torch.Tensor) -> Any:
    if isinstance(outputs, torch.Tensor):
        return logits
    return type(outputs)(**{**outputs, "logits": logits})


def unfit_loss(compute: object, fault: str, *, argument: str = "num_items_in_batch") -> str:
    """Return the error message for a loss with that fault; `argument` is its name for the number of items."""
    place = "compute_loss_func" if argument == "num_items_in_batch" else "the script's loss"
    return (
        f"{place}: {name_of(compute)} must return a sum divided by {argument}, as samples are spread over nodes; "
        f"{fault}. Divide the sum over the labels by {argument}, with weights that depend neither on other samples nor "
        "on earlier calls"
    )


def name_of(function: object) -> str:
    """Return a script's name for a function or a callable object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__name__))


def is_near(value: float, other: float) -> bool:
    """Return whether two losses differ by rounding alone."""
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))


def is_same(value: float, other: float) -> bool:
    """Return whether two losses of the same samples, from the same operations, are equal."""
    are_no_numbers = value != value and other != other  # NaN, of made-up values
    return value == other or are_no_numbers or abs(value - other) <= _ROUNDING * abs(other)


def _rows(value: Any, first: int, stop: int, count: int) -> Any:
    """Copy samples [first, stop) of outputs for `count` samples."""
    if isinstance(value, torch.Tensor):
        return (value[first:stop] if value.ndim and len(value) == count else value).clone()
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _rows(each, first, stop, count) for name, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(_rows(each, first, stop, count) for each in value)
    return value
