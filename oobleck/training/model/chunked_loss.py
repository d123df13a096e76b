"""The head and the standard loss of a causal language model, without all logits at once.

Of 8,192 tokens and 128,256 words the logits alone take 2 GB in bfloat16, and with their copies in float32 and their
gradients 16 GB. Here a chunk of tokens passes head and loss in both directions before the next one begins, so that only
the gradients of the head's input and weight are kept (as in Liger Kernel, Hsu et al. 2024, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutput

from oobleck.training.data import IGNORED_LABEL, Batch

from .losses import causal_lm_loss

MAX_LOGITS = 1 << 27
"""The most logits that a language model has at once: 512 MiB in float32."""

# What a model's own code may raise where it meets another output than that of its own trunk.
_MISFITS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


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


class ChunkedLoss:
    """Computes the loss of a model whose code gives its head's logits to the standard loss, and to nothing else."""

    def __init__(self, model: PreTrainedModel, head: nn.Linear, max_logits: int) -> None:
        self._model: Any = model
        self._head: Any = head
        self._chunk = max(1, max_logits // head.out_features)  # tokens

    @classmethod
    def of(cls, model: nn.Module, *, max_logits: int) -> ChunkedLoss | None:
        """Return that of a model with its head in place; None where it would not compute what the model does."""
        if not isinstance(model, PreTrainedModel) or model.base_model is model:
            return None
        head = model.get_output_embeddings()
        is_standard = model.loss_function in (ForCausalLMLoss, causal_lm_loss)
        if not is_standard or type(head) is not nn.Linear:
            return None
        chunked = cls(model, head, max_logits)
        return chunked if chunked._passes_logits_on() else None

    def is_watched(self) -> bool:
        """Return whether a hook, or another forward of the head, would see what is no longer there."""
        head: Any = self._head
        hooks = (head._forward_hooks, head._backward_hooks, head._backward_pre_hooks, self._model._forward_hooks)
        of_parameters = (parameter._backward_hooks for parameter in head.parameters())
        return "forward" in vars(head) or any(hooks) or any(of_parameters)

    def loss(self, batch: Batch, num_items: int, *, scale: float, **inputs: Any) -> torch.Tensor:
        """Return the sum of the token losses over `num_items`, as the model would.

        Gradients are computed at once, already multiplied by `scale`, by which the caller multiplies the loss's own:
        the small ones of float16 would vanish before.
        """
        loss: torch.Tensor | None = None
        taken: list[torch.Tensor] = []

        def compute(call: _Call) -> torch.Tensor:
            nonlocal loss
            loss = self._by_chunks(taken[0], call.labels, num_items, scale)
            return loss

        with self._instead(taken, compute):
            outputs = self._model(labels=batch.labels, num_items_in_batch=num_items, **inputs)
        assert outputs.loss is loss, "the model has returned what its loss function did"
        assert loss is not None
        return loss

    def _by_chunks(self, hidden: torch.Tensor, labels: torch.Tensor, num_items: int, scale: float) -> torch.Tensor:
        head, rows = self._head, hidden.reshape(-1, hidden.shape[-1])
        targets = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].reshape(-1)
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
            loss = functional.cross_entropy(logits, targets[chunk], ignore_index=IGNORED_LABEL, reduction="sum")
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
        of_hidden = None if of_rows is None else of_rows.view(hidden.shape)
        return _Computed.apply(total, scale, [of_hidden, *sums], hidden, *trained)  # type: ignore[no-any-return,no-untyped-call]

    def _passes_logits_on(self) -> bool:
        """Try the model's code around its trunk: whether head and loss meet, and nothing comes between or after."""
        model, ids = self._model, torch.zeros((1, 2), dtype=torch.int64)
        hidden = torch.zeros((1, 2, self._head.in_features))
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
                outputs = model(input_ids=ids, labels=ids, num_items_in_batch=2, use_cache=False)
        except _MISFITS:
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
        return None, None, None, *(each if each is None else each.mul_(factor) for each in known)
